"""What a layer's output has of the token that it reads, beside the state."""

from collections.abc import Mapping

from torch import Tensor

from deltalab.models.start import Started, Zeros
from deltalab.ops.scan import operands
from deltalab.rule import UpdateRule


class TokenBonus(Started):
    """The bonus of the token that is read, (w * r_t * k_t) v_t, for the r and the k of a rule's operands.

    w [H, K] starts at 0. It is held as a vector [H K], which weight decay leaves alone.

    Args:
        rule: The rule.
        heads: H.
        key_dim: The width of a head's keys; K is `UpdateRule.key_width` of it.

    References:
        Peng et al. 2025 (RWKV-7), arXiv:2503.14456.
    """

    def __init__(self, rule: UpdateRule, heads: int, key_dim: int) -> None:
        super().__init__()
        self.rule, self.heads = rule, heads
        self.weight = self.drawn("weight", Zeros(), heads * rule.key_width(key_dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
        """Computes the bonus [B, T, H, V] from what `scan` takes.

        `scan` makes the operands once more: where a kernel makes them, they are nowhere to be read.
        """
        made = operands(self.rule, q, k, v, gates)
        strength: Tensor = (made.r * made.k).mul(self.weight.view(self.heads, -1)).sum(-1, keepdim=True)
        return strength * v


def without_bonus(rule: UpdateRule) -> str | None:
    """Returns why a rule's layer has no `bonus`; None if it may have one."""
    if rule.transition is None:
        return f"bonus reads r and k of a rule of the algebra, which rule '{rule.name}' is not"
    if rule.carries or rule.transition.steps > 1 or rule.steps > 1:
        return f"bonus reads one key of each token, and rule '{rule.name}' has several, or some of earlier tokens"
    return None
