"""A Llama block of transformers with its linear layers made ternary: bytes, errors and times."""

import argparse
import copy
import time

import torch
from storm_kernels.ternary.nn import convert
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


def milliseconds(block, x, place, rounds):
    best = float("inf")
    with torch.no_grad():
        for _ in range(rounds):
            begin = time.perf_counter()
            block(x, position_embeddings=place)
            best = min(best, time.perf_counter() - begin)
    return 1e3 * best


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=7 * args.width // 2,
        num_attention_heads=args.width // 64,
        num_key_value_heads=max(1, args.width // 256),
    )
    config._attn_implementation = "sdpa"
    dense = LlamaDecoderLayer(config, 0).eval()
    ternary = copy.deepcopy(dense)
    print(convert(ternary, activations="int8"))
    for tokens in (1, 16):
        x = torch.randn(1, tokens, args.width)
        place = LlamaRotaryEmbedding(config)(x, torch.arange(tokens)[None])
        before, after = (milliseconds(one, x, place, args.rounds) for one in (dense, ternary))
        print(f"{tokens} tokens: float32 {before:.2f} ms, ternary {after:.2f} ms")


if __name__ == "__main__":
    main()
