"""Copies a GGUF file with its matrices stored in other types.

    python tools/requantize_gguf.py MODEL.gguf OUT.gguf --type BF16
    python tools/requantize_gguf.py MODEL.gguf OUT.gguf --type Q4_0 \
        --embedding-type Q8_0

Every matrix is dequantized and quantized anew by the package `gguf`, whose
quantizers are the reference of the format; vectors and metadata stay as they
are. The second file of a float MODEL is what `quantize="q4_0"` makes of it.
Types may be said in small letters; K-quants cannot be written. Tests import it
through tests/python/support/tiny_models.py.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

_EMBEDDING_OR_HEAD = ("token_embd.weight", "output.weight")
_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0")


def _copy_metadata(reader, writer) -> None:
    import gguf

    for field in reader.fields.values():
        # The writer states the version, the counts and the architecture.
        if field.name.startswith("GGUF.") or (
                field.name == "general.architecture"):
            continue
        kind = field.types[0]
        element = (field.types[-1] if kind == gguf.GGUFValueType.ARRAY
                   else None)
        writer.add_key_value(field.name, field.contents(), kind, element)


def type_of(name: str) -> str:
    """The type of a name in any letters. Raises ValueError."""
    if name.upper() not in _TYPES:
        raise ValueError(f"expected one of {', '.join(_TYPES)}, found {name}")
    return name.upper()


def requantize(source, out, kind: str, embedding_kind: str | None = None
               ) -> pathlib.Path:
    """Writes `out` and returns its path.

    `kind` is a type name ("Q4_0"); `embedding_kind` that of the embedding and
    the output head, if it is another one.
    """
    import gguf

    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(out), architecture)
    _copy_metadata(reader, writer)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, tensor.data,
                              raw_dtype=tensor.tensor_type)
            continue
        name = kind
        if embedding_kind and tensor.name in _EMBEDDING_OR_HEAD:
            name = embedding_kind
        target = gguf.GGMLQuantizationType[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(n) for n in reversed(tensor.shape)]
        values = np.ascontiguousarray(values.reshape(shape), np.float32)
        writer.add_tensor(tensor.name, gguf.quantize(values, target),
                          raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return pathlib.Path(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--type", required=True)
    parser.add_argument("--embedding-type")
    args = parser.parse_args()
    for flag in ("type", "embedding_type"):
        name = getattr(args, flag)
        try:
            setattr(args, flag, name and type_of(name))
        except ValueError as error:
            parser.error(f"--{flag.replace('_', '-')}: {error}")
    requantize(args.source, args.out, args.type, args.embedding_type)


if __name__ == "__main__":
    main()
