"""A model of the energy of molecules, whose forces are a derivative and whose training needs the second.

    python examples/molecules.py

The 162 molecules of the G2 set (ase.collections.g2) have from 1 to 14 atoms and lie in one batch, without padding: edges are
summed into atoms, atoms into molecules. Energies are fitted to the measured energies of atomization, and since the
geometries are minima, forces to zero. Forces are minus the derivative of the energy with respect to the positions, so
the gradient of their loss is a second derivative, through all operations. `pip install ase`.
"""

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from fastops import Segments, segment_broadcast, segment_sum

KCAL_PER_MOL = 0.0433641  # eV
FORCE_WEIGHT = 10  # of an error of 1 eV/Angstrom, beside one of 1 eV


@dataclass(frozen=True)
class Molecules:
    """A batch of M molecules with A atoms and E edges, one for each ordered pair of atoms of a molecule."""

    species: Tensor  # [A] the number of the element
    positions: Tensor  # [A, 3], Angstrom
    energies: Tensor  # [M] measured, eV, relative to that of the free atoms
    molecules: Segments  # atoms into molecules
    receivers: Segments  # edges into the atom that they end at; in order
    senders: Segments  # edges into the atom that they start at; not in order

    def to(self, device) -> "Molecules":
        return Molecules(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def energy_of_formation(molecule: dict, atoms: list) -> float:
    """What the molecule has, at rest at 0 K, beyond its atoms on their own (negative where it is bound); eV."""
    if len(atoms) == 1:
        return 0.0
    energy = molecule["enthalpy"] - molecule["ZPE"] - molecule["thermal correction"]
    return KCAL_PER_MOL * (energy - sum(atom["enthalpy"] - atom["thermal correction"] for atom in atoms))


def load() -> tuple[Molecules, int]:
    """The batch and the number of elements in it."""
    try:
        from ase.collections import g2
        from ase.data.g2 import data as measured
    except ImportError:
        raise SystemExit("molecules.py: the package ase must be installed: pip install ase") from None
    elements: dict[str, int] = {}
    species, positions, energies, lengths, senders, receivers = [], [], [], [], [], []
    for name in g2.names:
        atoms = g2[name]
        first = len(species)
        symbols = atoms.get_chemical_symbols()
        species += [elements.setdefault(symbol, len(elements)) for symbol in symbols]
        positions.append(torch.tensor(atoms.positions, dtype=torch.float32))
        energies.append(energy_of_formation(measured[name], [measured[symbol] for symbol in symbols]))
        lengths.append(len(atoms))
        atoms_of_molecule = range(first, len(species))
        pairs = [(i, j) for i in atoms_of_molecule for j in atoms_of_molecule if i != j]
        receivers += [i for i, _ in pairs]
        senders += [j for _, j in pairs]
    batch = Molecules(
        species=torch.tensor(species),
        positions=torch.cat(positions),
        energies=torch.tensor(energies),
        molecules=Segments.from_lengths(torch.tensor(lengths)),
        receivers=Segments.from_index(torch.tensor(receivers), len(species)),
        senders=Segments.from_index(torch.tensor(senders), len(species)),
    )
    return batch, len(elements)


class EnergyModel(torch.nn.Module):
    """Each atom sees its neighbours through Gaussians of their distances and adds its share to the energy of the molecule."""

    def __init__(self, num_elements: int, width: int = 32, num_gaussians: int = 16, reach: float = 5.0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(num_elements, width)
        self.filter = torch.nn.Linear(num_gaussians, width)
        self.energy = torch.nn.Sequential(torch.nn.Linear(2 * width, width), torch.nn.SiLU(), torch.nn.Linear(width, 1))
        self.register_buffer("centers", torch.linspace(0.5, reach, num_gaussians))
        self.sharpness = (num_gaussians / reach) ** 2

    def forward(self, batch: Molecules, positions: Tensor) -> Tensor:
        """`[M]` energies. Movement from atoms to edges is a broadcast too, so that its derivative is a segment sum, which
        unlike that of indexing gives the same bits in every run, on every device."""
        kinds = self.embedding(batch.species)
        between = segment_broadcast(positions, batch.senders) - segment_broadcast(positions, batch.receivers)
        distances = between.square().sum(1, keepdim=True).sqrt()
        weights = self.filter(torch.exp(-self.sharpness * (distances - self.centers).square()))
        seen = segment_sum(weights * segment_broadcast(kinds, batch.senders), batch.receivers)
        return segment_sum(self.energy(torch.cat((kinds, seen), 1)), batch.molecules).squeeze(1)

    def energies_and_forces(self, batch: Molecules) -> tuple[Tensor, Tensor]:
        positions = batch.positions.detach().requires_grad_()
        energies = self(batch, positions)
        (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -slope


def main(device: str = "cpu", steps: int = 120) -> dict:
    start = time.perf_counter()
    torch.manual_seed(0)
    batch, num_elements = load()
    model = EnergyModel(num_elements)
    model, batch = model.to(device), batch.to(device)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    history = []
    print(f"{batch.molecules.num_segments} molecules, {batch.molecules.num_rows} atoms, {batch.senders.num_rows} edges on {device}")
    print("  step     loss   energy error, eV   force, eV/Angstrom")
    for step in range(steps + 1):
        energies, forces = model.energies_and_forces(batch)
        errors = energies - batch.energies
        loss = errors.square().mean() + FORCE_WEIGHT * forces.square().mean()
        history.append((loss.item(), errors.abs().mean().item(), forces.square().mean().sqrt().item()))
        if step % (steps // 6 or 1) == 0:
            print(f"{step:6}{history[-1][0]:9.3f}{history[-1][1]:19.3f}{history[-1][2]:21.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    print(f"{seconds:.1f} s")
    names = ("loss", "energy_error", "force")
    return {"first": dict(zip(names, history[0])), "last": dict(zip(names, history[-1])), "seconds": seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    main(parser.parse_args().device)
