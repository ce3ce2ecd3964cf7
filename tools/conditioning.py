#!/usr/bin/env python3
"""How far the goldens move where the reference has one feature wrong.

    python tools/conditioning.py [NAME ...] [--markdown FILE]

For every golden of Gemma 4, Gemma 3n, VaultGemma and the models of embeddings
builds transformers' model, then the same with one thing about it changed, as a
careless engine may have it: erf instead of tanh in gelu, n - 1 instead of n, a
norm before instead of after a sum. What no configuration can ask for is done
to the source of transformers' own methods, in memory. The table has, for each
family and feature, by how many times the tolerance (5e-5 of the range of the
logits, or of the vectors' values) the results of the goldens that have the
feature move: the least and the most. Features that a configuration states are
held by tests in the same way (test_family_goldens.py,
test_embedding_goldens.py: each must move them by more than 20 times the
tolerance there).

Ends with status 1 if a feature moves no golden by more than the tolerance.
Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import activations

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import make_embedding_goldens
import make_goldens
from support import embedding_models, golden_models

TOLERANCE = 5e-5


@dataclasses.dataclass(frozen=True)
class Change:
    """A feature, and what is done to the source of a method of a class (whose
    name follows that of the family): texts and what takes their place.
    """

    what: str
    method: str  # "RMSNorm.forward", after the family's prefix
    edits: tuple[tuple[str, str], ...]
    # Whether a golden has the feature at all.
    when: Callable[[dict[str, Any]], object] = lambda text: True


def edit(what: str, method: str, *pairs: str, when: Any = None) -> Change:
    edits = tuple(zip(pairs[::2], pairs[1::2], strict=True))
    if when is None:
        return Change(what, method, edits)
    return Change(what, method, edits, when)


GELU = "the exact gelu (erf) for its tanh form"
RESIDUAL = "hidden_states = residual + hidden_states"


def sandwich(norm: str) -> tuple[str, str]:
    """A norm after a sum instead of before it."""
    before = f"hidden_states = self.{norm}(hidden_states)\n    {RESIDUAL}"
    after = f"hidden_states = self.{norm}(residual + hidden_states)"
    return before, after


def norm_of(weight: str, other: str, tail: str = "") -> Change:
    return edit(f"norms times {other} for {weight}", "RMSNorm.forward",
                f"* {'self.weight.float()' if weight == 'w' else ONE_MORE}"
                + tail,
                f"* {ONE_MORE if weight == 'w' else 'self.weight.float()'}"
                + tail)


ONE_MORE = "(1.0 + self.weight.float())"

_BOTH_POST_NORMS = [
    edit("the norm of attention after the sum", "DecoderLayer.forward",
         *sandwich("post_attention_layernorm")),
    edit("the norm of the feed-forward after the sum",
         "DecoderLayer.forward", *sandwich("post_feedforward_layernorm")),
]


def has_ple(text: dict[str, Any]) -> bool:
    return bool(golden_models.per_layer_size(text))


GEMMA4 = [
    norm_of("w", "1 + w"),
    edit("queries rotated before they are normed", "Attention.forward",
         "query_states = self.q_norm(query_states)", "pass",
         "query_states = query_states.transpose(1, 2)",
         "query_states = self.q_norm(query_states).transpose(1, 2)"),
    edit("scores divided by the root of head_dim", "Attention.forward",
         "scaling=self.scaling", "scaling=self.head_dim**-0.5"),
    edit("values that are not normed", "Attention.forward",
         "value_states = self.v_norm(value_states)", "pass"),
    edit("values that are the keys after their norm", "Attention.forward",
         "key_states = self.k_norm(key_states)",
         "key_states = self.k_norm(key_states)\n"
         "        if self.v_proj is None: value_states = key_states",
         when=lambda text: text.get("attention_k_eq_v")),
    *_BOTH_POST_NORMS,
    edit("no scale of the layers", "DecoderLayer.forward",
         "hidden_states *= self.layer_scalar", "pass"),
    edit("the scale of a layer before its embedding", "DecoderLayer.forward",
         "hidden_states *= self.layer_scalar", "pass",
         "if self.hidden_size_per_layer_input:",
         "hidden_states = hidden_states * self.layer_scalar\n"
         "    if self.hidden_size_per_layer_input:", when=has_ple),
    edit("gelu after the product with a layer's embedding",
         "DecoderLayer.forward",
         "hidden_states = self.act_fn(hidden_states)\n", "pass\n",
         "hidden_states = hidden_states * per_layer_input",
         "hidden_states = self.act_fn(hidden_states * per_layer_input)",
         when=has_ple),
]
_MOE = {"when": lambda text: text.get("enable_moe_block")}
GEMMA4 += [
    edit("the router reads what the feed-forward reads",
         "DecoderLayer.forward", "self.router(hidden_states_flat)",
         "self.router(self.pre_feedforward_layernorm(hidden_states_flat))",
         **_MOE),
    edit("experts read what the feed-forward reads", "DecoderLayer.forward",
         "self.pre_feedforward_layernorm_2(hidden_states_flat)",
         "self.pre_feedforward_layernorm(hidden_states_flat)", **_MOE),
    # That shares are not of 1, or not before that scale, is a common factor:
    # the norm after the sum takes it out.
    edit("no scale of an expert", "Router.forward",
         "top_k_weights = top_k_weights * self.per_expert_scale[top_k_index]",
         "pass", **_MOE),
    edit("what gates of experts and what they gate, exchanged",
         "Experts.forward", "self.act_fn(gate) * up", "self.act_fn(up) * gate",
         **_MOE),
]


def sparse(text: dict[str, Any]) -> bool:
    return any(text.get("activation_sparsity_pattern") or [])


GEMMA3N = [
    norm_of("w", "1 + w"),
    edit("the deviation of a sample (n - 1) for n", "MLP._gaussian_topk",
         "unbiased=False", "unbiased=True", when=sparse),
    edit("gates that exceed the cutoff as they are", "MLP._gaussian_topk",
         "return nn.functional.relu(inputs - cutoff_x)",
         "return torch.where(inputs > cutoff_x, inputs, 0.0)", when=sparse),
    edit("gelu before the cutoff", "MLP.forward",
         "gate_proj = self._gaussian_topk(gate_proj)",
         "gate_proj = self._gaussian_topk(self.act_fn(gate_proj))",
         when=sparse),
    edit("values that are not normed", "Attention.forward",
         "value_states = self.v_norm(value_states)", "pass"),
    edit("scores divided by the root of head_dim", "Attention.forward",
         "scaling=self.scaling", "scaling=self.head_dim**-0.5"),
    edit("the router's input divided by the root of its width",
         "AltUp.compute_router_modalities", "self.router_input_scale",
         "self.config.hidden_size**-0.5"),
    edit("the mix of streams transposed", "AltUp.predict",
         ".permute(0, 1, 3, 2)", ""),
    edit("no 1 beside the share of the change", "AltUp.correct",
         "all_coefs = self.correction_coefs(modalities) + 1.0",
         "all_coefs = self.correction_coefs(modalities)"),
    edit("the layer's embedding added to all streams", "DecoderLayer.forward",
         "corrected_predictions[1:] += first_prediction",
         "corrected_predictions += first_prediction"),
    edit("no division by the root of 2 after LAuReL", "DecoderLayer.forward",
         "(attn_gated + laurel_output) / math.sqrt(2)",
         "(attn_gated + laurel_output)"),
    edit("LAuReL of what is not normed", "DecoderLayer.forward",
         "self.laurel(active_prediction_normed)",
         "self.laurel(active_prediction)"),
    edit("the norm of the feed-forward after the sum",
         "DecoderLayer.forward",
         "attn_ffw_norm = self.post_feedforward_layernorm(attn_ffw)", "pass",
         "attn_laurel + attn_ffw_norm",
         "self.post_feedforward_layernorm(attn_laurel + attn_ffw)"),
]
GEMMA3 = [
    norm_of("1 + w", "w"),
    edit("queries and keys rotated before they are normed",
         "Attention.forward",
         "query_states = self.q_norm(query_states)", "pass",
         "key_states = self.k_norm(key_states)", "pass",
         "if past_key_values is not None:",
         "query_states = self.q_norm(query_states)\n"
         "    key_states = self.k_norm(key_states)\n"
         "    if past_key_values is not None:"),
    *_BOTH_POST_NORMS,
]
VAULT = [
    norm_of("1 + w", "w"),
    edit("no soft cap of the scores", "Attention.forward",
         "softcap=self.attn_logit_softcapping", "softcap=None"),
    edit("scores larger by a tenth", "Attention.forward",
         "scaling=self.scaling", "scaling=1.1 * self.scaling"),
]
SECOND = [
    norm_of("w", "1 + w"),
    edit("values that are not normed", "Attention.forward",
         "value_states = self.v_norm(value_states)", "pass"),
    edit("scores divided by the root of head_dim", "Attention.forward",
         "scaling=self.scaling", "scaling=self.head_dim**-0.5"),
    edit("the norm of attention after the sum", "EncoderLayer.forward",
         *sandwich("post_attention_layernorm")),
    edit("the norm of the feed-forward after the sum",
         "EncoderLayer.forward", *sandwich("post_feedforward_layernorm")),
    edit("no scale of the layers", "EncoderLayer.forward",
         "hidden_states *= self.layer_scalar", "pass"),
    edit("the scale of a layer before its embedding", "EncoderLayer.forward",
         "hidden_states *= self.layer_scalar", "pass",
         "self.ple_block(hidden_states, ",
         "self.ple_block(hidden_states * self.layer_scalar, "),
    edit("gelu after the product with a layer's embedding",
         "TextPLEBlock.forward",
         "hidden_states = self.act_fn(hidden_states)\n", "pass\n",
         "hidden_states = hidden_states * per_layer_input",
         "hidden_states = self.act_fn(hidden_states * per_layer_input)"),
]
# (family, beginning of the goldens' names, prefixes of classes, changes)
FAMILIES = [
    ("Gemma 4", "gemma4-",
     ("Gemma4Text", "Gemma4", "Gemma4UnifiedText", "Gemma4Unified"), GEMMA4),
    ("Gemma 3n", "gemma3n-", ("Gemma3nText", "Gemma3n"), GEMMA3N),
    ("VaultGemma", "gemma2-vault", ("VaultGemma",), VAULT),
    ("EmbeddingGemma", "dense plain", ("Gemma3",), GEMMA3),
    ("EmbeddingGemma 2", "second", ("EmbeddingGemma2",), SECOND),
]


@contextlib.contextmanager
def changed(model: Any, prefixes: tuple[str, ...],
            change: Change) -> Iterator[None]:
    """The model with a method of one of its classes as `change` has it."""
    owner, name = change.method.split(".")
    wanted = {prefix + owner for prefix in prefixes}
    kinds = {
        type(part) for part in model.modules()
        if type(part).__name__ in wanted and hasattr(type(part), name)
    }
    if len(kinds) != 1:
        raise LookupError(f"{change.what}: classes {kinds} of {wanted}")
    kind = kinds.pop()
    before = getattr(kind, name)
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(before)))
    # Edits are written for a method's body of one level.
    for old, new in change.edits:
        found = source.count(old)
        if not found:
            raise LookupError(f"{change.what}: no {old!r} in {change.method}")
        source = source.replace(old, new)
    space = dict(vars(sys.modules[kind.__module__]))
    exec(compile(source, f"<{change.method}>", "exec"), space)
    setattr(kind, name, space[name])
    try:
        yield
    finally:
        setattr(kind, name, before)


@contextlib.contextmanager
def exact_gelu(model: Any) -> Iterator[None]:
    parts = [part for part in model.modules() if hasattr(part, "act_fn")]
    before = [part.act_fn for part in parts]
    for part in parts:
        part.act_fn = activations.ACT2FN["gelu"]
    try:
        yield
    finally:
        for part, act_fn in zip(parts, before, strict=True):
            part.act_fn = act_fn


def opened(name: str) -> tuple[Any, dict[str, Any], Callable[[], Any]]:
    """(model, the config's part for text, what computes its results)."""
    if name in embedding_models.names():
        golden = embedding_models.read(name)
        model = make_embedding_goldens.build(golden)
        dense = [torch.from_numpy(w.copy()) for w in golden.dense().values()]

        def vectors() -> Any:
            found = []
            for text in golden.texts():
                with torch.no_grad():
                    out = model(torch.tensor([text])).last_hidden_state[0]
                    vector = out.mean(0)
                    for weights in dense:
                        vector = weights @ vector
                found.append((vector / vector.norm()).numpy())
            return np.stack(found)

        return model, golden.model.text_config, vectors
    written = golden_models.read(name)
    model = make_goldens.build(written)
    return model, written.text_config, lambda: make_goldens.logits_of(
        model, written.tokens())


def moved(expected: Any, found: Any) -> float:
    span = float(expected.max() - expected.min())
    return float(np.abs(expected - found).max()) / span / TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    every = [*golden_models.names(), *embedding_models.names()]
    rows: dict[tuple[str, str], list[float]] = {}
    for family, begins, prefixes, changes in FAMILIES:
        for name in args.names or every:
            if not name.startswith(tuple(begins.split())):
                continue
            model, text, run = opened(name)
            expected = run()
            with exact_gelu(model):
                rows.setdefault((family, GELU), []).append(
                    moved(expected, run()))
            for change in changes:
                if not change.when(text):
                    continue
                with changed(model, prefixes, change):
                    rows.setdefault((family, change.what), []).append(
                        moved(expected, run()))
            assert np.array_equal(run(), expected), "left changed"
            print(name, file=sys.stderr)
    lines = ["| family | wrong | goldens | times the tolerance |",
             "|---|---|---|---|"]
    for (family, what), found in rows.items():
        low, high = min(found), max(found)
        times = f"{low:.0f}" if len(found) == 1 else f"{low:.0f} to {high:.0f}"
        lines.append(f"| {family} | {what} | {len(found)} | {times} |")
    weak = [key for key, found in rows.items() if not max(found) > 1]
    strong = sum(min(found) > 20 for found in rows.values())
    lines.append("")
    lines.append(f"{strong} of {len(rows)} move every golden that has them by "
                 "more than 20 times the tolerance.")
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n", "utf-8")
    if weak:
        sys.exit(f"moves nothing: {weak}")


if __name__ == "__main__":
    main()
