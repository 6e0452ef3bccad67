"""`Experts`: a layer that sends each token to a few of many feed-forwards, by its figures."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from parallelism.algorithms import Deduplicated
from parallelism.arrays import with_plain_numbers
from parallelism.display.quantities import short_errors

ROUTERS = ("softmax", "sigmoid")
"""What makes probabilities of the scores of a router."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The feed-forward of some layers is one of ``count`` experts, of which each token takes ``chosen``.

    The defaults are those of Mixtral (Jiang et al., 2024, arXiv:2401.04088, section 2.1), in which every layer has
    experts and no token is dropped.  ``ValueError`` for figures that do not fit together.
    """

    count: int
    chosen: int
    width: int | None = None
    """The width between the products of one expert; None: the ``feed_forward`` of the model."""
    shared_width: int = 0
    """That of the experts that every token takes, together; 0: there are none."""
    latent: int | None = None
    """Features of what experts get and give: a product of a token makes it, and another one what is added of the sum, as in
    Nemotron 3 Super; None: those of the model.  Shared experts and routers work on these."""
    dense_layers: int = 0
    """So many layers at the beginning have no experts."""
    every: int = 1
    """Layer i has experts where ``i >= dense_layers`` and ``(i + 1) % every == 0``."""
    layers: tuple[bool, ...] | None = None
    """Whether each layer has experts, in place of the two figures before; None: these say it."""
    capacity: float | None = None
    """Rows that an expert accepts, as a factor of the even share; None: as many as come, no token is dropped."""
    load: float = 1.0
    """Rows of the fullest expert, divided by the mean.  Simulations count with it; a program does not."""
    router: str = "softmax"
    """``softmax``, over all experts, or ``sigmoid``, of each expert by itself."""
    normalized: bool = True
    """Whether the gates of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """What the gates are multiplied by."""
    gates_inputs: bool = False
    """Whether the gates multiply what experts get, not what they give."""
    groups: int = 1
    """Experts are in so many groups of neighbours, and a token chooses from the best groups only."""
    groups_chosen: int = 1
    """The number of the best groups (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.2.2)."""
    group_best: int = 1
    """The score of a group is the sum of so many of its best experts' scores."""
    balance: float = 0.0
    """The weight of the load-balancing loss of Switch Transformer (arXiv:2101.03961, equation 4)."""
    balance_bias: bool = False
    """Whether a bias, which no gradient changes, is added to the scores in the choice, as in DeepSeek-V3
    (arXiv:2412.19437, section 2.1.2).  It is no parameter."""
    shared_gate: bool = False
    """Whether a sigmoid gate for each token multiplies what the shared experts give."""
    deduplicated: bool = False
    """Whether software sends a token once to each node with experts of its (`parallelism.algorithms.Deduplicated`).
    Prices count with it; a program sends every row."""

    @short_errors
    def __post_init__(self) -> None:
        with_plain_numbers(self)
        least = {"count": 1, "chosen": 1, "every": 1, "groups": 1, "groups_chosen": 1, "group_best": 1}
        for name, bound in {**least, "shared_width": 0, "dense_layers": 0}.items():
            value = getattr(self, name)
            if type(value) is not int or value < bound:
                raise ValueError(f"{name} of experts must be an integer of at least {bound}, got {value!r}")
        for name, told in (("width", "width"), ("latent", "latent features")):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{told} of an expert must be an integer of at least 1, or None, got {value!r}"
                )
        if self.router not in ROUTERS:
            raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        if self.capacity is not None and not 0 < self.capacity < inf:
            raise ValueError(f"capacity of experts must be a positive number, or None, got {self.capacity!r}")
        if not 1 <= self.load < inf:
            raise ValueError(f"load of the fullest expert must be a number of at least 1, got {self.load!r}")
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(bool(each) for each in self.layers))
        self._check_choice()

    def _check_choice(self) -> None:
        if self.count % self.groups or self.groups_chosen > self.groups:
            raise ValueError(
                f"groups must divide the count of experts, and groups_chosen be at most groups, got "
                f"count={self.count}, groups={self.groups} and groups_chosen={self.groups_chosen}"
            )
        inside = self.count // self.groups
        if self.chosen > inside * self.groups_chosen or self.group_best > inside:
            raise ValueError(
                f"a token can choose at most the {inside * self.groups_chosen} experts of {self.groups_chosen} "
                f"groups, and group_best be at most the {inside} of one, got chosen={self.chosen} and "
                f"group_best={self.group_best}"
            )

    @property
    def tokens(self) -> Deduplicated:
        """Which experts a token may have."""
        return Deduplicated(self.chosen, self.count, self.groups, self.groups_chosen)

    @property
    def remark(self) -> str:
        """What prices assume that no run does; empty if it is nothing."""
        return "a token is priced as sent once to each node of its experts" if self.deduplicated else ""

    def at(self, layer: int) -> bool:
        """Whether this layer has experts."""
        if self.layers is not None:
            return self.layers[layer]
        return layer >= self.dense_layers and (layer + 1) % self.every == 0
