"""What the layers of the delta-rule family share: q, k, v, beta, the cache, the decay's weights."""

import math

import torch
from torch import nn

from .cache import check_kind, projected_dtype
from .convolution import ShortConvolution
from .norm import RMSNorm, at_least_float32, check_sizes, l2norm
from .state import RecurrentCache


class DeltaLayer(nn.Module):
    """Weights for q, k, v and beta before a delta rule, and for the norm and projection after it.

    num_v_heads heads of v, beta and the state; num_heads of q and k. A subclass may add weights of
    its own, and writes forward.
    """

    def __init__(
        self, hidden_size, num_heads, head_dim, *, num_v_heads=None, head_v_dim=None, norm_eps=1e-5
    ):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
        check_sizes(num_v_heads=num_v_heads, head_v_dim=head_v_dim)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_v_heads, self.head_v_dim = num_v_heads, head_v_dim
        keys, values = num_heads * head_dim, num_v_heads * head_v_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.q_conv1d = ShortConvolution(keys)
        self.k_conv1d = ShortConvolution(keys)
        self.v_conv1d = ShortConvolution(values)
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        self.o_norm = RMSNorm(head_v_dim, norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def project(self, x, cache):
        """Return q, k [B, T, num_heads, K] of length 1, v [B, T, num_v_heads, V], beta, the new tails.

        The cache is read, not written: what fails later must leave it as it was.
        """
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, T, {self.hidden_size}]")
        check_kind(cache, RecurrentCache)
        q_tail, k_tail, v_tail = [None] * 3 if cache is None else cache.tails
        q, q_tail = self.q_conv1d(self.q_proj(x), q_tail)
        k, k_tail = self.k_conv1d(self.k_proj(x), k_tail)
        v, v_tail = self.v_conv1d(self.v_proj(x), v_tail)
        q = l2norm(q.unflatten(-1, (self.num_heads, self.head_dim)))
        k = l2norm(k.unflatten(-1, (self.num_heads, self.head_dim)))
        v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        beta = at_least_float32(self.b_proj(x)).sigmoid()
        return q, k, v, beta, [q_tail, k_tail, v_tail]

    def init_cache(self, batch_size):
        """Return an empty RecurrentCache, its tails of the projections' dtype."""
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return RecurrentCache(
            batch_size, self.num_v_heads, self.head_dim, self.head_v_dim,
            [c.dim for c in convolutions], self.q_conv1d.kernel_size,
            dtype=projected_dtype(self.q_proj.weight), device=self.q_proj.weight.device,
        )  # fmt: skip

    def _apply(self, fn, recurse=True):
        # What a layer holds besides its submodules is its decay: A_log and dt_bias, which stay in
        # float32. In bfloat16 a dt_bias of -6.9 is off by up to 0.016, and its rate by 1.6 %.
        held = [t for p in self.parameters(recurse=False) for t in (p, p.grad) if t is not None]

        def keep_wide(tensor):
            new = fn(tensor)
            if any(tensor is t for t in held) and new.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(new.device)
            return new

        return super()._apply(keep_wide, recurse)


def initial_A_log(num_heads, low, high=16):
    """Return the logarithm of rates drawn from U(low, high), in float32 whatever the default dtype."""
    return nn.Parameter(torch.empty(num_heads, dtype=torch.float32).uniform_(low, high).log())


def initial_dt_bias(n, low=1e-3, high=0.1):
    """Return biases whose softplus is log-uniform from low to high (arXiv 2312.00752, section 3.6)."""
    dt = torch.empty(n, dtype=torch.float32).uniform_(math.log(low), math.log(high)).exp()
    return nn.Parameter(dt + (-torch.expm1(-dt)).log())
