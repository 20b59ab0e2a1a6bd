"""Wrong answers to chapter 9: `exercise__fault`; each check must refuse them."""

import torch


def latent_cache_bytes__keys_and_values(layers, tokens, r, R, s):
    return 2 * layers * tokens * (r + R) * s


def latent_cache_bytes__no_shared_part(layers, tokens, r, R, s):
    return layers * tokens * r * s


def latent_cache_bytes__sixteen_bits(layers, tokens, r, R, s):
    return layers * tokens * (r + R) * 2


def latent_cache_bytes__one_layer(layers, tokens, r, R, s):
    return tokens * (r + R) * s


def absorbed_read__no_scale(q, c, W_K, W_V, scale):
    return ((W_K @ q) @ c.T).softmax(-1) @ c @ W_V


def absorbed_read__scale_of_the_row(q, c, W_K, W_V, scale):
    return (c.shape[1] ** -0.5 * (W_K @ q) @ c.T).softmax(-1) @ c @ W_V


def absorbed_read__latents_as_values(q, c, W_K, W_V, scale):
    return (scale * (W_K @ q) @ c.T).softmax(-1) @ c


def absorbed_read__transposed_keys(q, c, W_K, W_V, scale):
    return (scale * (q @ W_K) @ c.T).softmax(-1) @ c @ W_V


def absorbed_read__keys_not_absorbed(q, c, W_K, W_V, scale):
    return (scale * q @ c.T).softmax(-1) @ c @ W_V


def absorbed_read__mean(q, c, W_K, W_V, scale):
    return torch.ones(len(c)).softmax(0) @ c @ W_V


def tokens_until_larger__as_large(H, K, r, R):
    return -(-H * K * K * 4 // ((r + R) * 2))


def tokens_until_larger__rounded(H, K, r, R):
    return round(H * K * K * 4 / ((r + R) * 2))


def tokens_until_larger__no_shared_part(H, K, r, R):
    return H * K * K * 4 // (r * 2) + 1


def tokens_until_larger__same_format(H, K, r, R):
    return H * K * K // (r + R) + 1


def tokens_until_larger__one_head(H, K, r, R):
    return K * K * 4 // ((r + R) * 2) + 1
