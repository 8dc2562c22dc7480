"""A graph attention network that tells the two factions of Zachary's karate club apart.

    python examples/karate.py

34 members and 78 friendships, as `networkx.karate_club_graph()` gives them; after a quarrel the club split in two. The
network is told the faction of a few members and finds those of the others from who is whose friend: two layers in which
each member looks at his friends with several heads, weighted by a softmax over his own friends, which differ in number
(Velickovic et al., "Graph Attention Networks", 2018). `pip install networkx`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastops import Segments, segment_softmax, segment_sum

KNOWN = (0, 1, 3, 33, 32, 29)  # the instructor, the administrator, and two friends of each


def load() -> tuple[Tensor, Segments, Tensor]:
    """Who looks at whom (E senders), the edges into each of the 34 members, and the faction of each."""
    try:
        import networkx
    except ImportError:
        raise SystemExit("karate.py: the package networkx must be installed: pip install networkx") from None
    graph = networkx.karate_club_graph()
    edges = torch.tensor(list(graph.edges))
    itself = torch.arange(len(graph))
    senders = torch.cat((edges[:, 0], edges[:, 1], itself))
    receivers = torch.cat((edges[:, 1], edges[:, 0], itself))
    factions = torch.tensor([int(graph.nodes[member]["club"] == "Officer") for member in graph])
    return senders, Segments.from_index(receivers, len(graph)), factions


class GraphAttention(nn.Module):
    """`[V, inputs]` to `[V, heads * outputs]`: each node sums its neighbours, weighted by how well they match."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, heads * outputs, bias=False)
        self.sending = nn.Parameter(torch.randn(heads, outputs) * outputs**-0.5)
        self.receiving = nn.Parameter(torch.randn(heads, outputs) * outputs**-0.5)
        self.heads = heads

    def forward(self, nodes: Tensor, senders: Tensor, edges: Segments) -> Tensor:
        hidden = self.project(nodes).unflatten(-1, (self.heads, -1))  # [V, heads, outputs]
        sending, receiving = (hidden * self.sending).sum(-1), (hidden * self.receiving).sum(-1)  # [V, heads]
        scores = F.leaky_relu(sending[senders] + receiving[edges.index], 0.2)  # [E, heads]
        weights = segment_softmax(scores, edges)
        return segment_sum(hidden[senders], edges, weight=weights).flatten(1)


class Network(nn.Module):
    def __init__(self, members: int, hidden: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.first = GraphAttention(members, hidden, heads)
        self.second = GraphAttention(hidden * heads, 2, heads)
        self.heads = heads

    def forward(self, nodes: Tensor, senders: Tensor, edges: Segments) -> Tensor:
        hidden = F.elu(self.first(nodes, senders, edges))
        return self.second(hidden, senders, edges).unflatten(-1, (self.heads, 2)).mean(1)


def main(device: str = "cpu", epochs: int = 200, seed: int = 1) -> int:
    """Trains and returns how many of the 34 members are put into their faction."""
    torch.manual_seed(seed)
    senders, edges, factions = (part.to(device) for part in load())
    nodes = torch.eye(edges.num_segments, device=device)  # nothing is known of a member but who it is
    network = Network(edges.num_segments).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=5e-4)
    known = torch.tensor(KNOWN, device=device)
    for epoch in range(epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(nodes, senders, edges)[known], factions[known])
        loss.backward()
        optimizer.step()
        if epoch % 50 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch:3d}: loss {loss.item():.4f}")
    with torch.no_grad():
        right = int((network(nodes, senders, edges).argmax(1) == factions).sum())
    print(f"{right} of {len(factions)} members are in their faction, of whom {len(KNOWN)} were given")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args().device)
