"""Whether moving to the GPU pays, for each operation and size: the same as `python -m fastops copy-cost`.

    python benchmarks/copy_cost.py --png copy_cost.png      # all operations; without a GPU, the part of the CPU
    python benchmarks/copy_cost.py --ops sum softmax --sizes 10000 1000000 --features 1 --json
"""

import sys

from fastops.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["copy-cost", *sys.argv[1:]]))
