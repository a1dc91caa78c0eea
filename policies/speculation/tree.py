"""A token tree: several continuations of a sequence that one pass verifies at once."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_CANDIDATES = 20_000
"""Most nodes that a beam proposes."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The draft tokens of one pass as nodes of a tree.

    parents: for each node, the number of the node that it continues; -1: the newest token of the sequence.
    Nodes are listed by depth, and the children of a node by their probability, the largest first.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)
    """Depth of each node, from 1: its place in the pass."""
    ranks: tuple[int, ...] = field(init=False)
    """Rank of each node among the children of its parent, from 0."""

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError("tree=[]: must have at least one node")
        depths: list[int] = []
        ranks: list[int] = []
        num_children = [0] * (len(self.parents) + 1)
        for node, parent in enumerate(self.parents):
            if not isinstance(parent, int) or not -1 <= parent < node:
                raise ValueError(
                    f"node {node} continues node {parent}, so it is no tree; "
                    "the parent of a node must be -1 (the newest token) or a node before it"
                )
            depth = 1 if parent < 0 else depths[parent] + 1
            if depths and depth < depths[-1]:
                raise ValueError(
                    f"node {node} has depth {depth} and follows a node of depth {depths[-1]}; "
                    "list the nodes by depth"
                )
            depths.append(depth)
            ranks.append(num_children[parent + 1])
            num_children[parent + 1] += 1
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "ranks", tuple(ranks))

    @property
    def num_nodes(self) -> int:
        """Number of draft tokens."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Maximum number of draft tokens that a pass can accept."""
        return self.depths[-1]

    def num_nodes_to(self, depth: int) -> int:
        """Counts the nodes of the first `depth` levels."""
        return sum(each <= depth for each in self.depths)

    def children(self, node: int) -> list[int]:
        """Returns the nodes that continue a node, by rank; -1: those that continue the newest token."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    @classmethod
    def of_paths(cls, paths: list[list[int]]) -> TokenTree:
        """Returns the tree of Medusa's choices, each of them a path of ranks such as [0, 2, 1]."""
        ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        numbers = {path: number for number, path in enumerate(ordered)}
        parents = []
        for path in ordered:
            wrong = next((rank for rank in path if not isinstance(rank, int) or rank < 0), None)
            if wrong is not None:
                raise ValueError(f"path {list(path)} has rank {wrong}; ranks are whole numbers >= 0")
            if not path:
                raise ValueError("an empty path names no node; a path has at least one rank")
            if path[:-1] and path[:-1] not in numbers:
                raise ValueError(f"path {list(path)} continues {list(path[:-1])}, which is no path")
            sibling = (*path[:-1], path[-1] - 1)
            if path[-1] and sibling not in numbers:
                raise ValueError(f"path {list(path)} has rank {path[-1]}, and {list(sibling)} is no path")
            parents.append(numbers[path[:-1]] if path[:-1] else -1)
        return cls(tuple(parents))

    @classmethod
    def of_widths(cls, widths: list[int]) -> TokenTree:
        """Returns the tree in which every node of a level has widths[level] children."""
        parents: list[int] = []
        level = [-1]
        for width in widths:
            if width < 1:
                raise ValueError(f"widths={widths}: must be >= 1")
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def of_beam(
        cls, width: int, depth: int, num_nodes: int, rate: float = 0.75, rank_decay: float = 0.32
    ) -> TokenTree:
        """Returns the tree of EAGLE-2 (Li et al., EMNLP 2024) and SGLang, for a draft of mean confidence.

        The draft proposes `width` children of the newest token, then at each of the further levels `width`
        children of the `width` most likely nodes of the level before. The num_nodes most likely ones of all
        are verified. The likelihood of a node is the product of the rates of its path: `rate` for a first
        child and, where those before it have missed, rank_decay times as much for every further one. The real
        draft chooses by its confidence, so its tree is another one in every pass.
        """
        for name, value in (("width", width), ("depth", depth), ("num_nodes", num_nodes)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be >= 1")
        for name, share in (("rate", rate), ("rank_decay", rank_decay)):
            if not 0 < share <= 1:
                raise ValueError(f"{name}={share}: must be > 0 and <= 1")
        candidates = width + (depth - 1) * width**2
        if candidates > MAX_CANDIDATES:
            raise ValueError(
                f"width={width}, depth={depth}: propose {candidates:,} nodes; must be at most "
                f"{MAX_CANDIDATES:,}: width + (depth - 1) x width x width"
            )
        by_rank, missed = [], 1.0
        for rank in range(width):
            share = rate * rank_decay if rank else rate
            by_rank.append(missed * share)
            missed *= 1 - share
        level = [(share, [rank]) for rank, share in enumerate(by_rank)]
        nodes = level
        for _ in range(1, depth):
            level = [
                (likelihood * share, [*path, rank])
                for likelihood, path in _likeliest(level, width)
                for rank, share in enumerate(by_rank)
            ]
            nodes = nodes + level
        return cls.of_paths([path for _, path in _likeliest(nodes, num_nodes)])


def _likeliest(nodes: list[tuple[float, list[int]]], num: int) -> list[tuple[float, list[int]]]:
    """Returns the num most likely nodes; of equally likely ones the first of a shorter path first."""
    return sorted(nodes, key=lambda node: (-node[0], len(node[1]), node[1]))[:num]
