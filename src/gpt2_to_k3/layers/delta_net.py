"""DeltaNet's layer: a memory that corrects what a key already reads."""

from ..ops import chunk_delta_rule, recurrent_delta_rule
from ._delta_layer import DeltaLayer


class DeltaNet(DeltaLayer):
    """y = o_proj(RMSNorm(delta rule(q, k, v, beta))), with beta = sigmoid(b_proj(x)).

    q, k and v each go through a projection, a short convolution of 4 tokens and SiLU; q and k are
    then divided by their length, head by head, and the output is normed head by head.

    Shapes: x [B, T, hidden_size] -> y [B, T, hidden_size]; K = V = head_dim channels a head, and
    num_heads * head_dim need not be hidden_size.
    Units: beta in (0, 1), one for each head and token.
    Dtype: the weights'; beta, the rule and its state in float32 (float64 for float64 weights).
    Errors: ValueError for a size that is not an integer >= 1, if x has another shape, or if the
    cache is another layer's or another batch's; the cache is then as it was.
    The module holds no state of a sequence: that is in the cache the caller passes.
    Source: Yang et al. 2024 (arXiv 2406.06484), section 3; `fla/layers/delta_net.py`.
    """

    def __init__(self, hidden_size, num_heads, head_dim):
        super().__init__(hidden_size, num_heads, head_dim)

    def forward(self, x, cache=None):
        """Remember and read x [B, T, hidden_size], after the tokens in the cache, if any."""
        q, k, v, beta, tails = self.project(x, cache)
        rule = recurrent_delta_rule if x.shape[1] == 1 else chunk_delta_rule
        o, S = rule(q, k, v, beta=beta, initial_state=None if cache is None else cache.S)
        if cache is not None:
            cache.update(tails, S, x.shape[1])
        return self.o_proj(self.o_norm(o).flatten(2))
