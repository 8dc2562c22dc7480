"""How long operations take beside other ways to do the same: `pytest benchmarks`, see README.md here."""
