"""Atlas: each step of the memory learns the last tokens again, and not the newest alone (the Omega rule)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class Atlas(UpdateRule):
    """S_t = alpha_t S_{t-1} - eta_t / window sum_{i = t-window+1..t} gamma_i k_i (S_{t-1}^T k_i - v_i)^T
    o_t = scale S_t^T q_t,   alpha_t = exp(g_t)

    Behrouz et al. 2025 (arXiv:2505.23735, Section 3.2): gradient descent on the errors of the last `window` tokens, the
    Omega rule, on a linear memory. gamma_i says how much token i counts, eta_t how far the step goes. With window 1 it
    is the delta rule that reads the undecayed state. The paper has no division by window; here it keeps the steps
    together from overshooting, so that the state cannot grow for unit keys. The paper's MLP memory, polynomial keys
    and Muon are not here. The state is S and the last window - 1 keys, values and gammas: [B, H, K, V], [B, H, n, K],
    [B, H, n, V] and [B, H, n, 1]. No form of it is parallel; a token costs 2 window K V.
    """

    name: ClassVar[str] = "atlas"
    paper: ClassVar[str] = "arXiv:2505.23735"

    g: Gate = knob(forms.mamba2_decay(), forms.const(0))
    eta: Gate = knob(forms.sigmoid(), forms.const(1))
    gamma: Gate = knob(forms.sigmoid(), forms.const(1))
    window: int = knob(4, 1, 2)

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        batch, _, heads, key_dim = k.shape
        value_dim = v.shape[-1]
        shapes = ((key_dim, value_dim), (0, key_dim), (0, value_dim), (0, 1))
        memory, keys, values, gammas = (v.new_zeros(batch, heads, *shape, dtype=dtype) for shape in shapes)
        return memory, keys, values, gammas

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        memory, *window = state
        past = window[0].shape[2]
        g, eta, gamma = (gates[name].expand(k.shape[:3])[..., None] for name in ("g", "eta", "gamma"))
        q, k, v, g, eta, gamma = (x.to(memory.dtype).transpose(1, 2) for x in (q, k, v, g, eta, gamma))
        keys, values, gammas = (torch.cat([old, new], 2) for old, new in zip(window, (k, v, gamma), strict=True))
        out = []
        for t in range(q.shape[2]):
            seen = slice(max(past + t + 1 - self.window, 0), past + t + 1)
            here = keys[:, :, seen]
            error = gammas[:, :, seen] * (here @ memory - values[:, :, seen])
            step = eta[:, :, t, :, None] / self.window
            memory = g[:, :, t, :, None].exp() * memory - step * (here.transpose(-1, -2) @ error)
            out.append((q[:, :, t, None] @ memory).squeeze(-2))
        keep = slice(max(past + q.shape[2] + 1 - self.window, 0), None)
        return scale * torch.stack(out, dim=1), (memory, *(x[:, :, keep] for x in (keys, values, gammas)))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: Any, **gates: Tensor
    ) -> tuple[Tensor, State]:
        memory, *window = state
        g, eta, gamma = (gates[name].expand(k.shape[:2])[..., None, None] for name in ("g", "eta", "gamma"))
        after = g.exp() * memory
        window = [
            torch.cat([old, new], 2) for old, new in zip(window, (k[:, :, None], v[:, :, None], gamma), strict=True)
        ]
        for key, value, counts in zip(*(x[:, :, -self.window :].unbind(2) for x in window), strict=True):
            error = torch.einsum("bhkv,bhk->bhv", memory, key) - value
            after = after - eta / self.window * counts[..., None] * key[..., None] * error[..., None, :]
        kept = (x[:, :, max(x.shape[2] + 1 - self.window, 0) :] for x in window)
        return scale * torch.einsum("bhkv,bhk->bhv", after, q), (after, *kept)
