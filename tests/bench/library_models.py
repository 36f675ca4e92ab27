"""Small models of all architectures that transformers, timm and torchvision know, for real_models.

Nobody chose them: each configuration is made narrow and short by the names that its options have.
What cannot be made so, or takes other inputs, says so and is left out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["LIBRARIES", "Maker", "Trained", "library_models"]

MAX_PARAMETERS = 40_000_000

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "model_dim"), 64),
    **dict.fromkeys(("embedding_size", "attention_hidden_size", "q_lora_rank"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "ffn_hidden_size"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    "image_size": 64,
    "pad_token_id": 0,
    "vocab_size": 200,
}
"""Values of options, whichever a configuration has."""


class Trained(NamedTuple):
    """A model, and what a step computes with it."""

    module: nn.Module
    forward: Callable[[nn.Module], Any]


Maker = Callable[[], Trained]


def _small(module: nn.Module) -> nn.Module:
    count = sum(one.numel() for one in module.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count} parameters are too many")
    return module


# --- transformers ---------------------------------------------------------------------------


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 190, (2, 32))}


def _pairs() -> dict[str, Tensor]:
    return {**_tokens(), "decoder_input_ids": torch.randint(3, 190, (2, 24))}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 64, 64)}


def _sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 8000)}


TASKS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": _tokens,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": _tokens,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": _pairs,
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": _image,
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": _sound,
}
"""transformers' own tables, and what their models are fed."""


def _options(config: type) -> dict[str, Any]:
    """Return which options a configuration has of those that make it small."""
    names = {*inspect.signature(config.__init__).parameters, *dir(config)}
    names |= set(getattr(config, "__dataclass_fields__", ()))
    return {name: value for name, value in SMALL.items() if name in names}


def _transformer(kind: str, class_name: str, inputs: Callable[[], dict[str, Tensor]]) -> Trained:
    transformers = importlib.import_module("transformers")
    config_class = transformers.CONFIG_MAPPING[kind]
    config = config_class(**_options(config_class))
    module = _small(getattr(transformers, class_name)(config))
    fed = inputs()
    return Trained(module, lambda net: _floats(net(**fed)))


def _floats(out: Any) -> list[Any]:
    """Return an output's values; a cache of keys is none."""
    return [value for name, value in out.items() if "past" not in name and "cache" not in name]


def _transformers() -> Iterator[tuple[str, Maker]]:
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    seen = set()
    for table, inputs in TASKS.items():
        for kind, names in getattr(tables, table).items():
            name = names if isinstance(names, str) else names[0]
            if name not in seen:
                seen.add(name)
                yield f"transformers {name}", partial(_transformer, kind, name, inputs)


# --- models of images -----------------------------------------------------------------------


def _timm_model(name: str) -> Trained:
    timm = importlib.import_module("timm")
    module = _small(timm.create_model(name, num_classes=10))
    size = module.default_cfg["input_size"]
    images = torch.randn(2, *size)
    return Trained(module, lambda net: net(images))


def _timm() -> Iterator[tuple[str, Maker]]:
    timm = importlib.import_module("timm")
    for family in timm.list_modules():
        names = sorted(timm.list_models(module=family), key=lambda name: (len(name), name))
        for word in ("tiny", "small", "nano", "micro", "xxs", "s0", ""):
            fitting = [name for name in names if word in name]
            if fitting:
                yield f"timm {fitting[0]}", partial(_timm_model, fitting[0])
                break


def _torchvision_model(name: str) -> Trained:
    torchvision = importlib.import_module("torchvision")
    build = torchvision.models.get_model_builder(name)
    taken = {"weights", "weights_backbone"} & inspect.signature(build).parameters.keys()
    module = _small(build(**dict.fromkeys(taken)))
    kind = type(module).__module__
    if ".detection." in kind:
        images = [torch.rand(3, 96, 96), torch.rand(3, 80, 112)]
        box = torch.tensor([[8.0, 8.0, 40.0, 48.0], [20.0, 10.0, 60.0, 70.0]])
        target = {"boxes": box, "labels": torch.tensor([1, 2])}
        target |= {"masks": torch.ones(2, 96, 112, dtype=torch.uint8)}
        target |= {"keypoints": torch.ones(2, 17, 3)}
        return Trained(module, lambda net: net(images, [target, target]))
    if ".video." in kind:
        clip = torch.randn(1, 3, 16, 224, 224) if "mvit" in name else torch.randn(1, 3, 8, 64, 64)
        return Trained(module, lambda net: net(clip))
    if ".optical_flow." in kind:
        frames = torch.rand(2, 1, 3, 128, 128)
        return Trained(module, lambda net: net(*frames, num_flow_updates=3))
    size = 299 if "inception" in name else 224
    images = torch.randn(2, 3, size, size)
    return Trained(module, lambda net: net(images))


def _torchvision() -> Iterator[tuple[str, Maker]]:
    torchvision = importlib.import_module("torchvision")
    for name in torchvision.models.list_models():
        yield f"torchvision {name}", partial(_torchvision_model, name)


LIBRARIES: dict[str, Callable[[], Iterator[tuple[str, Maker]]]] = {
    "transformers": _transformers,
    "timm": _timm,
    "torchvision": _torchvision,
}


def library_models(names: list[str]) -> dict[str, Maker]:
    """Return how to make each model that these libraries know, by library and name.

    Raises:
        ImportError: one of them is not there.
    """
    return {name: maker for library in names for name, maker in LIBRARIES[library]()}
