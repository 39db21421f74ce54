"""Weights in the safetensors format: a length, a JSON header with names, types, shapes and places, then the bytes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

Tensor = Any
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
WIDEST = 100 << 20
"""Bytes of the longest header that is read."""


def write(place: Path, weights: Mapping[str, Tensor]) -> None:
    """The weights, in the order of their names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    at = 0
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        parts.append(bytes(tensor.view(-1).view(torch.uint8).tolist()))
        header[name] = {
            "dtype": KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at := at + len(parts[-1])],
        }
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)
    place.write_bytes(b"".join([len(words).to_bytes(8, "little"), words, *parts]))


def read(place: Path) -> dict[str, Tensor]:
    """The weights of a file; ValueError or KeyError if it is none."""
    data = place.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if size > min(WIDEST, len(data)):
        raise ValueError(f"{place.name} is no safetensors file")
    header = json.loads(data[8 : 8 + size])
    kinds = {name: kind for kind, name in KINDS.items()}
    return {
        name: _tensor(data[8 + size + entry["data_offsets"][0] : 8 + size + entry["data_offsets"][1]], kinds, entry)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _tensor(data: bytes, kinds: Mapping[str, Any], entry: Mapping[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=kinds[entry["dtype"]]).reshape(entry["shape"])
