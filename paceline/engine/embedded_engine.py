"""The default inference engine: continuous batching of any Hugging Face causal LM, by the model's own forward.

Law: a step reads one set of weights from its first to its last operation; `bind` between two steps is the whole swap
(V6). Each token carries the version that was bound when it was sampled (V4). One step is one packed forward pass: the
newest token of every running sequence, and the prompts of those that were just admitted. A model whose attention
cannot be replaced runs whole forward passes instead (`whole_forward`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from paceline.core.errors import ConfigError, VersionError
from paceline.core.sample import Completion, GenerationRequest, StepTokens
from paceline.engine.model_loading import build_skeleton
from paceline.engine.sampling import SamplingPlan, plan_sampling, sample
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence_table import SequenceTable
from paceline.engine.slot_attention import IMPLEMENTATION, register_slot_attention
from paceline.engine.slot_cache import PackedInput, PromptBlock, SlotCache, pack_step
from paceline.engine.weight_slots import WeightSlots
from paceline.engine.whole_forward import whole_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DECODE_MARGIN = 4


class EmbeddedEngine:
    """`InferenceEngine` inside the process of its replica. Serves nothing until weights are bound.

    Args:
        model_config_dir: Hugging Face directory; only its config is read.
        dtype: dtype of the weights that will be bound ("float32", "bfloat16", "float16").
        max_num_seqs: places, sequences that decode at the same time.
        max_model_len: most tokens of prompt and response together; bounds the KV cache.
        kv_cache: at a swap, "recompute" prefills sequences in flight again under the new weights before their next
            token, "keep" leaves their keys and values as they are.
        seed: of sampling; the same requests, swaps and seed give the same tokens.
        decode: ids to text, needed by requests with stop strings only.

    Greedy requests (temperature 0) report the log-prob of the chosen token at temperature 1. `pinned_version` of a
    request is the caller's business: the engine has one set of weights.

    Raises:
        ConfigError: the model cannot be built or is of a kind that cannot be served.
    """

    def __init__(
        self,
        *,
        model_config_dir: str,
        dtype: str,
        max_num_seqs: int,
        max_model_len: int,
        kv_cache: Literal["recompute", "keep"] = "recompute",
        seed: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        device: str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._model, self._packs = build_model(model_config_dir, dtype, self._device)
        check_can_serve(self._model, max_model_len)
        if kv_cache == "keep" and not self._packs:
            raise ConfigError(f"rollout.kv_cache=keep: {type(self._model).__name__} runs without a cache to keep")
        self._slots = WeightSlots(self._model, self._device)
        self._kv_cache = kv_cache
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._decode = decode
        self._table = SequenceTable(max_num_seqs, max_model_len)
        self._cache = SlotCache(max_num_seqs, max_model_len)
        self._scheduler = Scheduler(self._table, self._cache, self._model.config.get_text_config().vocab_size)
        self._sampling: SamplingPlan | None = None
        self._version: int | None = None
        self._stale = False
        self._tokens_generated = 0
        self._last_step: StepTokens | None = None

    @property
    def version(self) -> int | None:
        """Packed version of the bound weights."""
        return self._version

    @property
    def running(self) -> int:
        """Sequences that hold a place."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Requests without a place yet, and those that came complete and are returned by the next step."""
        return len(self._scheduler.waiting) + self._scheduler.unreturned

    @property
    def tokens_generated(self) -> int:
        """Response tokens sampled since the engine was made."""
        return self._tokens_generated

    @property
    def last_step(self) -> StepTokens | None:
        """The tokens that the last `step` made, one per running sequence; None when it made none."""
        return self._last_step

    @property
    def apply(self) -> Literal["mapped", "copied"]:
        """The model's parameters point at what is bound."""
        return "mapped"

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every tensor the engine serves from, aliases included."""
        return self._slots.expected()

    def expected_ties(self) -> Sequence[tuple[str, str]]:
        """Pairs of names that are one tensor of the model."""
        return self._slots.ties

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Serve from these tensors, without a copy, from the next step on.

        Raises:
            CoverageError: names, dtypes, shapes, layouts or ties differ; all are named and nothing has changed.
        """
        self._slots.bind(tensors)
        self._version = version
        self._stale = self._stale or self._kv_cache == "recompute"

    def unbind(self) -> None:
        """Let go of the bound tensors, so that their lease can end; requests still queued are forgotten."""
        self.abort(self._scheduler.request_ids)
        self._slots.release()
        self._version = None

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the model's modules hold now, by every name."""
        return self._slots.served()

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; a request that carries response tokens is continued.

        Raises:
            ConfigError: a request that cannot run, by its id; none of the requests is queued then.
        """
        if self._decode is None and (asking := [r.request_id for r in requests if r.params.stop]):
            raise ConfigError(f"request {asking[0]} has stop strings, but the engine has no decode function")
        self._scheduler.add(requests)

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """Take these requests out and return what they have; unknown ids are ignored."""
        self._sampling = None
        return self._scheduler.abort(request_ids)

    def step(self) -> list[Completion]:
        """Admit what fits, add one token to every running sequence, and return those that finished.

        Raises:
            VersionError: there is work, but no weights were bound.
        """
        finished = self._scheduler.take_complete()
        self._last_step = None
        if not self.running and not self.waiting:
            return finished
        if self._version is None:
            raise VersionError("the engine has requests but no weights: bind a version before the first step")
        with torch.inference_mode():
            new = self._scheduler.admit()
            if new:
                self._sampling = None
            unfilled = range(self._table.count) if self._stale else new
            # A pass that fails leaves keys and values in an unknown state: they are computed again next time.
            self._stale = True
            tokens, logprobs = self._next_tokens(self._scheduler.prompt_blocks(unfilled))
            self._stale = False
        token_ids, token_logprobs = tokens.cpu().numpy(), logprobs.cpu().numpy()
        ended = self._table.append(token_ids, token_logprobs, self._version)
        ids = self._table.request_ids()
        self._last_step = StepTokens(ids, token_ids.tolist(), token_logprobs.tolist(), self._version)
        self._tokens_generated += self._table.count
        for row in self._ended_by_text():
            finished.append(self._scheduler.remove(row, "stop"))
        for row in ended.tolist():
            if self._table.requests[row] is not None:
                finished.append(self._scheduler.remove(row))
        if finished:
            self._sampling = None
        return finished

    def _next_tokens(self, passes: Sequence[Sequence[PromptBlock]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of every row: ids and log-probs. Fills the places that `passes` names."""
        logits = self._packed_logits(passes) if self._packs else whole_logits(self._model, self._table, self._device)
        if self._sampling is None:
            table, n = self._table, self._table.count
            self._sampling = plan_sampling(table.temperature[:n], table.top_p[:n], table.top_k[:n], self._device)
        return sample(logits, self._sampling, self._generator)

    def _packed_logits(self, passes: Sequence[Sequence[PromptBlock]]) -> torch.Tensor:
        """Run the prompts, all but the last pass alone; logits of the newest token of every row."""
        table = self._table
        self._cache.fit(int(table.lengths[: table.count].max()), table.count)
        for blocks in passes[:-1]:
            self._run_model(pack_step(self._cache, table.lengths[:0], table.lengths[:0], blocks, self._device))
        tokens, positions = table.newest()
        packed = pack_step(self._cache, tokens, positions, passes[-1] if passes else (), self._device)
        return self._run_model(packed)

    def _run_model(self, packed: PackedInput) -> torch.Tensor:
        """Logits of the newest tokens, [decoding, vocabulary]; of one token, to be ignored, when there are none."""
        kept = max(1, packed.plan.decoding)
        output = self._model(
            input_ids=packed.ids,
            position_ids=packed.positions,
            use_cache=False,
            logits_to_keep=0 if kept == packed.ids.shape[1] else torch.arange(kept, device=self._device),
            slot_step=packed.plan,
        )
        logits: torch.Tensor = output.logits
        return logits[0]

    def _ended_by_text(self) -> list[int]:
        """Rows whose newest token completed one of their stop strings."""
        ended: list[int] = []
        if self._decode is None:
            return ended
        for row, request in enumerate(self._table.requests[: self._table.count]):
            if request is None or not request.params.stop:
                continue
            # Each token adds at least a character, and the margin covers characters spread over tokens.
            longest = max(len(text) for text in request.params.stop)
            end = int(self._table.lengths[row])
            start = max(int(self._table.prompt_lengths[row]), end - longest - _DECODE_MARGIN)
            text = self._decode(self._table.tokens[row, start:end].tolist())
            if any(stop in text for stop in request.params.stop):
                ended.append(row)
        return ended


def build_model(path: str, dtype: str, device: torch.device) -> tuple[PreTrainedModel, bool]:
    """The empty model, and whether its attention runs over packed slots; one that cannot keeps its own attention.

    Raises:
        ConfigError: no causal LM can be built.
    """
    register_slot_attention()
    try:
        model = build_skeleton(path, dtype, IMPLEMENTATION, device)
    except ConfigError:
        return build_skeleton(path, dtype, "eager", device), False
    if can_pack(model):
        return model, True
    return build_skeleton(path, dtype, "eager", device), False


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the packed forward pass is right for this architecture: replaceable attention, plain keys and values."""
    parameters = inspect.signature(model.forward).parameters
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and {"position_ids", "logits_to_keep"} <= parameters.keys()
        and kinds <= {"full_attention", "sliding_attention"}
    )


def check_can_serve(model: PreTrainedModel, max_model_len: int) -> None:
    """Refuse sequences that the model has no positions for.

    Raises:
        ConfigError: fewer positions than `max_model_len`.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and max_model_len > longest:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the {longest} positions of {type(model).__name__}"
        )
