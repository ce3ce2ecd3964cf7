"""Generation keywords: the one table that calls, command line and docs use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypedDict,
    TypeVar,
    get_args,
)
from typing import get_type_hints as hints_of

import numpy as np
import numpy.typing as npt

from gemmakv import _core
from gemmakv._support.progress import Callback, Progress
from gemmakv.errors import ArgumentError, unexpected
from gemmakv.generation._grammar import Grammar
from gemmakv.generation._option_kinds import (
    Bias,
    Choice,
    Flag,
    Function,
    GrammarSource,
    Integer,
    Kind,
    Number,
    ReplyStopData,
    ResponseFormat,
    Seed,
    Texts,
    TokenIds,
)
from gemmakv.models._config import LoadedModel

PrefixMode = Literal["off", "read", "write", "on"]
Speculate = Literal["off", "lookup", "draft"]
Stop = str | Sequence[str] | None
GrammarLike = Grammar | str | None
Format = Mapping[str, Any] | None
LogitBias = Mapping[int, float] | None
LogitsProcessor = Callable[
    [npt.NDArray[np.int32], npt.NDArray[np.float32]],
    npt.NDArray[np.float32] | None,
]

_Int = TypeVar("_Int")
_Float = TypeVar("_Float")
_Seconds = TypeVar("_Seconds")
_Bool = TypeVar("_Bool")
_Seed = TypeVar("_Seed")
_Bias = TypeVar("_Bias")
_Stop = TypeVar("_Stop")
_Ids = TypeVar("_Ids")
_Function = TypeVar("_Function")
_Text = TypeVar("_Text")
_Grammar = TypeVar("_Grammar")
_Format = TypeVar("_Format")
_Speculate = TypeVar("_Speculate")


# Keywords that are no options of the table.
APART = ("progress", "prompt_progress", "draft")


@dataclasses.dataclass(frozen=True)
class Option:
    """A row of the table.

    Attributes:
      kind: what values it takes.
      default: its default; where that is None, None may be given, too.
      help: half a line on what it does.
      more: what else the reference says.
      in_chat: whether it is a setting of a chat.
      in_core: whether the core is given it.
    """

    kind: Kind
    default: Any
    help: str
    more: str = ""
    in_chat: bool = True
    in_core: bool = True

    def check(self, name: str, value: object) -> Any:
        """As the core takes it; None for the default. Raises ValueError that
        begins with `name`.
        """
        if value is None and self.default is None:
            return None
        return self.kind.check(name, value)


class _Keywords(
    TypedDict,
    Generic[
        _Int, _Float, _Seconds, _Bool, _Seed, _Bias, _Stop, _Ids, _Function,
        _Text, _Grammar, _Format, _Speculate,
    ],
    total=False,
):
    max_tokens: Annotated[_Int, Option(
        Integer(), 256, "tokens to sample at most",
        "0 computes the prompt only.")]
    min_tokens: Annotated[_Int, Option(
        Integer(), 0, "tokens before the text may end",
        "None of the first so many tokens is eos or a stop token, nor "
        "completes a stop string that counts. max_tokens, the capacity and "
        "the deadline end a text even so.")]
    temperature: Annotated[_Float, Option(
        Number(0), 0.0, "0 is greedy, 1 the model's own spread",
        "Probabilities are proportional to exp(logit / temperature).")]
    top_k: Annotated[_Int, Option(
        Integer(), 0, "sample among the k likeliest; 0 is off")]
    top_p: Annotated[_Float, Option(
        Number(0, 1, above=True), 1.0,
        "sample from this share of probability; 1 is off")]
    min_p: Annotated[_Float, Option(
        Number(0, 1), 0.0,
        "least probability, as a share of the likeliest's")]
    repetition_penalty: Annotated[_Float, Option(
        Number(0, above=True), 1.0, "above 1 avoids tokens of the text",
        "Divides positive and multiplies negative logits of all tokens of "
        "the conversation.")]
    presence_penalty: Annotated[_Float, Option(
        Number(), 0.0, "subtracted from logits of sampled tokens")]
    frequency_penalty: Annotated[_Float, Option(
        Number(), 0.0,
        "subtracted from a logit at each use of its token")]
    logit_bias: Annotated[_Bias, Option(
        Bias(), None, "added to a token's logit; -inf bans it",
        "A mapping of token ids to numbers.", in_chat=False)]
    logits_processor: Annotated[_Function, Option(
        Function(), None, "called with the logits of each token",
        "processor(token_ids, logits) is given int32 [tokens], the whole "
        "conversation, and float32 [vocab_size] as the model gives them, "
        "before any other option. It changes these, or returns others. Slow: "
        "each token waits for Python. It runs on threads of the engine, must "
        "not use this model or the cache, and should depend on its arguments "
        "alone. What it raises ends the request.", in_chat=False)]
    seed: Annotated[_Seed, Option(
        Seed(), None,
        "makes sampling repeatable; random where not set",
        "The result reports it.")]
    stop: Annotated[_Stop, Option(
        Texts(), None, "text that ends the reply",
        "Or a list of them. It is cut from the text.")]
    stop_token_ids: Annotated[_Ids, Option(
        TokenIds(), None, "tokens that end the reply, as eos does",
        "They are not part of the text.")]
    ignore_eos: Annotated[_Bool, Option(
        Flag(), False, "continues after an end token of the model",
        "Those of a chat template count as such.")]
    deadline: Annotated[_Seconds, Option(
        Number(0), None, "seconds after which the reply ends",
        'Counted from the call; finish_reason is "deadline", and what was '
        "sampled stays.")]
    logprobs: Annotated[_Bool, Option(
        Flag(), False, "reports log-probabilities of the tokens",
        "Those of the model, before any option.", in_chat=False)]
    top_logprobs: Annotated[_Int, Option(
        Integer(), 0,
        "also reports the N likeliest tokens at each place",
        "Implies logprobs.", in_chat=False)]
    prefix_cache: Annotated[_Text, Option(
        Choice(get_args(PrefixMode)), "on",
        "take from the prefix cache, and leave in it",
        '"read" takes and "write" leaves only.', in_chat=False)]
    grammar: Annotated[_Grammar, Option(
        GrammarSource(), None, "a grammar that the text follows",
        "A `Grammar`, or the text of a Lark one. The text is a whole one of "
        "the grammar, and ends where that ends; max_tokens, stop strings and "
        "the deadline may cut it short. Needs the extra `grammar`; the first "
        "one takes some seconds more, for the vocabulary.",
        in_chat=False, in_core=False)]
    response_format: Annotated[_Format, Option(
        ResponseFormat(), None, "JSON, as OpenAI's API asks for it",
        '{"type": "json_object"}, or {"type": "json_schema", "json_schema": '
        '{"schema": ...}}. As `grammar` with a JSON schema.',
        in_chat=False, in_core=False)]
    speculate: Annotated[_Speculate, Option(
        Choice(get_args(Speculate)), None,
        "check guesses of the next tokens in the same step",
        '"lookup" guesses that a text goes on as it did where its last tokens '
        'stood before, also in other requests of its tenant; "draft" asks the '
        "draft model. Both take what a grammar forces for a guess, too, and "
        "guess where that pays; the tokens are the same, "
        "see docs/speculation.md. None: as the model was loaded.")]
    parse_special: Annotated[_Bool, Option(
        Flag(), False, "names of control tokens in the prompt mean them",
        "Otherwise they are ordinary text.", in_chat=False, in_core=False)]
    progress: Progress
    prompt_progress: Callback | None
    draft: LoadedModel | None


class Options(
    _Keywords[
        int,
        float,
        float | None,
        bool,
        int | None,
        LogitBias,
        Stop,
        Sequence[int] | None,
        LogitsProcessor | None,
        PrefixMode,
        GrammarLike,
        Format,
        Speculate | None,
    ],
    total=False,
):
    """Keywords of `generate` and `stream`: docs/options.md lists them.

    `progress` is a callable(done, total) in tokens, or True for a line on
    stderr. `prompt_progress` is a callable(done, total) in tokens of the prompt
    alone, which rises to the total before the first piece of a stream; what it
    raises ends the call. `draft` is a `Gemma` to ask what comes next in this
    call, instead of the one that the model was loaded with.
    """


class BatchOptions(
    _Keywords[
        int | Sequence[int],
        float | Sequence[float],
        float | None | Sequence[float | None],
        bool | Sequence[bool],
        int | None | Sequence[int | None],
        LogitBias | Sequence[LogitBias],
        Stop | Sequence[Stop],
        Sequence[int] | None | Sequence[Sequence[int] | None],
        LogitsProcessor | None | Sequence[LogitsProcessor | None],
        PrefixMode | Sequence[PrefixMode],
        GrammarLike | Sequence[GrammarLike],
        Format | Sequence[Format],
        Speculate | None | Sequence[Speculate | None],
    ],
    total=False,
):
    """Keywords of `generate_batch`: those of `Options` but `prompt_progress`.

    Each but `progress` and `draft` is one value for all rows or a list with
    one value per row. A list of str is one `stop` for all rows,
    one of ints one `stop_token_ids`; one per row is a list of lists (or of
    None).
    """


class GenerationOptions:
    """The table of generation keywords, but for those that take objects."""

    table: ClassVar[Mapping[str, Option]] = MappingProxyType(
        {
            name: hint.__metadata__[0]
            for name, hint in hints_of(_Keywords, include_extras=True).items()
            if name not in APART
        }
    )

    @classmethod
    def check(
        cls, options: Mapping[str, object], vocab_size: int | None = None
    ) -> None:
        """Raises the ValueError that a call with `options` raises: it names
        the first that is bad. Token ids are checked only with `vocab_size`.
        TypeError for a keyword that is none.
        """
        [row] = split_rows(options, 1, batch=False)
        if vocab_size is not None:
            core_options(row).validate(vocab_size)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON Schema of the options that JSON can say."""
        properties = {}
        for name, option in cls.table.items():
            schema = option.kind.schema()
            if schema is None:
                continue
            if option.default is None:
                schema = {"anyOf": [schema, {"type": "null"}]}
            properties[name] = schema | {
                "default": option.default,
                "description": f"{option.help}. {option.more}".strip(),
            }
        return {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }


def speculation(value: object, has_draft: bool = False) -> str:
    """Says where guesses come from in a model that is loaded with
    `speculate=value`, and maybe a draft. Raises ValueError for what cannot be.
    """
    checked: str | None = GenerationOptions.table["speculate"].check(
        "speculate", value
    )
    if checked == "draft" and not has_draft:
        raise ArgumentError(
            "speculate", "a draft= with 'draft'", value, shown="none"
        )
    return checked or ("draft" if has_draft else "lookup")


DEFAULT_MAX_TOKENS: int = GenerationOptions.table["max_tokens"].default


def split_rows(
    keywords: Mapping[str, object], rows: int, batch: bool
) -> list[dict[str, Any]]:
    """Converted options of each row; absent ones are left out.

    Raises ValueError naming the option that is bad, TypeError for a keyword
    that is none.
    """
    result: list[dict[str, Any]] = [{} for _ in range(rows)]
    for name, value in keywords.items():
        if name in APART:
            continue
        option = GenerationOptions.table.get(name)
        if option is None:
            raise TypeError(
                f"unexpected keyword {name!r}; known: "
                + ", ".join([*GenerationOptions.table, *APART])
            )
        values: Sequence[object] = [value] * rows
        names = [name] * rows
        if batch and not option.kind.is_one(value):
            values = list(value)  # type: ignore[call-overload]
            names = [f"{name}[{i}]" for i in range(rows)]
            if len(values) != rows:
                raise unexpected(
                    name,
                    f"one value or a list of {rows} (one per row)",
                    len(values),
                )
        for row, label, one in zip(result, names, values):
            converted = option.check(label, one)
            if converted is not None:
                row[name] = converted
    for row in result:
        if "grammar" in row and "response_format" in row:
            raise ArgumentError(
                "response_format",
                "it or grammar",
                row["response_format"],
                shown="both",
            )
    return result


def grammar_of(row: Mapping[str, Any]) -> tuple[str, Grammar | None]:
    """The grammar of one row of `split_rows`, and the option that gave it."""
    if "grammar" in row:
        own = row["grammar"].kind == "tools"
        return "tools" if own else "grammar", row["grammar"]
    return "response_format", row.get("response_format")


def core_options(
    row: Mapping[str, Any],
    end_ids: Sequence[int] = (),
    suppressed: Sequence[int] = (),
) -> _core.GenerateOptions:
    """The core's options of one row of `split_rows`, ended by `end_ids` as by
    eos. Tokens of `suppressed` that the row has no bias of are never sampled.
    """
    options = _core.GenerateOptions()
    for name, value in row.items():
        if GenerationOptions.table[name].in_core:
            setattr(options, name, value)
    stops = row.get("stop", ())
    of_reply: list[bytes] = [s for s in stops if isinstance(s, ReplyStopData)]
    if of_reply:
        options.reply_stop = of_reply
        options.stop = [one for one in stops if one not in of_reply]
    if end_ids and not options.ignore_eos:
        options.stop_token_ids = [*options.stop_token_ids, *end_ids]
    if suppressed:
        never = dict.fromkeys(suppressed, -math.inf)
        options.logit_bias = list((never | dict(options.logit_bias)).items())
    return options
