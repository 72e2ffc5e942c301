"""A deltalab model with any rule as a model of `transformers`. Every exported folder holds a copy of this file."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from deltalab.models.block import Block
from deltalab.models.graphs.tokens import TokenGraphs
from deltalab.models.layer import initialize
from deltalab.models.model import Model, balance_of, parameter_groups
from deltalab.models.parts.cache import LayerCache
from deltalab.models.rule_inputs.gates import shard_gates
from deltalab.models.spec import ModelSpec
from deltalab.ops.packing import Packing


class DeltaLabConfig(PretrainedConfig):
    """The fields of `ModelSpec`, some of which have a second name that `transformers` expects."""

    model_type = "deltalab"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_attention_heads": "heads",
        "tie_word_embeddings": "tie_embeddings",
    }

    @property
    def num_hidden_layers(self) -> int:
        """The number of blocks, also if `layers` is a list."""
        return self.spec().depth

    def spec(self) -> ModelSpec:
        """Returns the model that the configuration describes."""
        return ModelSpec.of({f.name: getattr(self, f.name) for f in fields(ModelSpec)})


class StateCache(Cache):
    """The memory of all layers for each row of a batch: the last inputs of their convolutions, and their states.

    The size is constant for a recurrent rule; attention layers add the keys and values of every token. A state cannot
    forget its last tokens again, so the cache cannot be cropped.

    Attributes:
        states: The memory of each layer, empty before the first token.
        seen: How many columns were read, padding included. `generate` counts by this number.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[LayerCache] = []
        self.seen = 0

    def numel(self) -> int:
        """Counts the numbers that the cache holds."""
        return sum(state.numel() for state in self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns how many columns were read."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1, which means that there is no limit."""
        return -1

    @property
    def is_compileable(self) -> bool:
        """False, so that `generate` does not compile `forward`."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False: a state cannot forget its last tokens."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Raises `ValueError`: a state cannot forget its last tokens."""
        raise ValueError("a recurrent state cannot give its last tokens back")

    def reset(self) -> None:
        """Forgets everything."""
        self.states, self.seen = [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the rows into another order, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows with these indices, in their order."""
        self.states = [state.rows(indices) for state in self.states]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self.states = [state.rows(torch.arange(len(state.conv)).repeat_interleave(repeats)) for state in self.states]


class Reading(NamedTuple):
    """What a model has read.

    Attributes:
        hidden: The vectors of all tokens after the last norm, in one row if `packing` is not None.
        packing: The packing of the rows; None if they stayed as they were.
        bounds: The bounds of the sequences in the row; None if each row is one.
        cache: The cache after the tokens; None without one.
        states: The embeddings, what each block but the last returns, and the vectors after the last norm, each
            [B, T, d]; None if they were not asked for.
        balance: The balance losses of experts, in training; None if there are none.
    """

    hidden: Tensor
    packing: Packing | None
    bounds: Tensor | None
    cache: StateCache | None
    states: tuple[Tensor, ...] | None
    balance: Tensor | None

    def spread(self, y: Tensor) -> Tensor:
        """Returns vectors of all tokens as rows [B, T, ...]."""
        return y if self.packing is None else self.packing.spread(y)


class DeltaLabModel(PreTrainedModel):
    """A deltalab `Model` with the interface of `transformers` that returns vectors [B, T, d]: saving and loading."""

    config_class = DeltaLabConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    # Half precision would round a decay exp(-a dt) near 1 to 1.
    _keep_in_fp32_modules_strict = ["learned"]  # noqa: RUF012

    def __init__(self, config: DeltaLabConfig) -> None:
        super().__init__(config)
        self.model = Model(config.spec())
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Returns the embedding of tokens."""
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding of tokens."""
        self.model.embed = cast(nn.Embedding, value)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        how = getattr(gradient_checkpointing_func, "keywords", {})
        spec = self.model.spec
        if enable and how.get("use_reentrant") and (spec.balances or spec.value_residual):
            part = "the balance loss of model.experts" if spec.balances else "model.value_residual"
            raise ValueError(
                f"{part} has no gradient under reentrant checkpoints: give "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        self.gradient_checkpointing = enable
        self._checkpoint, self._every_n_layers = gradient_checkpointing_func, every_n_layers

    def _call(self, block: Block, *inputs: Any) -> Any:
        """Calls a block, which backward computes again if the block's number is a multiple of `every_n_layers`."""
        number = next(i for i, candidate in enumerate(self.model.blocks) if candidate is block)
        return block(*inputs) if number % self._every_n_layers else self._checkpoint(block.__call__, *inputs)

    def shard_gates(self) -> None:
        """Keeps the parameters of gates in fp32 under FSDP2 with mixed precision; see `models.layer.shard_gates`.

        Call this method before `accelerator.prepare`, or between the construction of a `Trainer` and its training.
        """
        shard_gates(self)

    def parameter_groups(self, weight_decay: float, lr: float, *, muon: bool = False) -> list[dict[str, Any]]:
        """Returns an optimizer's groups with a study's rates and decays; see `models.model.parameter_groups`."""
        return parameter_groups(self.model, weight_decay, lr, muon=muon)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initializes the parameters that the checkpoint lacks as deltalab does, from the seed of torch."""
        initialize(
            self.model, torch.initial_seed(), wanted=lambda value: not getattr(value, "_is_hf_initialized", False)
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        """Computes the vectors [B, T, d] of tokens after the last norm.

        Args:
            input_ids: As in `DeltaLabForCausalLM.forward`, and so are the others.
            attention_mask: 0 marks padding.
            past_key_values: The cache that an earlier call returned.
            inputs_embeds: The embeddings [B, T, d]; None with `input_ids`.
            use_cache: Whether to return a cache.
            output_hidden_states: Whether to return the vectors after each block.
            **more: `position_ids`, `seq_idx` and the bounds of packed sequences.

        Raises:
            ValueError: Inputs contradict each other.
        """
        read = self._read(
            input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, output_hidden_states, **more
        )
        return BaseModelOutputWithPast(read.spread(read.hidden), read.cache, hidden_states=read.states)

    def _read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: StateCache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        *,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        output_attentions: bool | None = None,
    ) -> Reading:
        """Reads tokens. Arguments and errors are those of `DeltaLabForCausalLM.forward`."""
        if output_attentions:
            raise ValueError("a deltalab model returns no attentions")
        if output_hidden_states and self.model.spec.attention_residuals:
            raise ValueError(
                "a model with attention_residuals has no hidden state between blocks, which read all before"
            )
        if past_key_values is not None and not isinstance(past_key_values, StateCache):
            raise ValueError(f"past_key_values must be a StateCache, not a {type(past_key_values).__name__}")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        cache = StateCache() if use_cache and past_key_values is None else past_key_values
        bounds = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        if bounds is not None and cache is not None:
            raise ValueError("packed sequences (cu_seqlens) keep no cache: give use_cache=False")
        starts = None if cache is not None or bounds is not None else _starts(position_ids, seq_idx)
        packing = self._packing(x, attention_mask, starts, bounds, rows=cache is not None)
        if packing is not None:
            x, bounds = packing.pack(x), packing.cu_seqlens
        call = self._call if self.gradient_checkpointing and self.training else None
        between: list[Tensor] = []
        hidden, after = self.model.transform(
            x,
            cache.states if cache is not None and cache.states else None,
            cu_seqlens=bounds,
            checkpoint=_watched(call, between) if output_hidden_states else call,
        )
        if cache is not None:
            cache.states, cache.seen = after, cache.seen + (x.shape[1] if packing is None else packing.shape[1])
        read = Reading(hidden, packing, bounds, cache, None, balance_of(after))
        if not output_hidden_states:
            return read
        return read._replace(states=tuple(map(read.spread, (x, *between[:-1], hidden))))

    def _packing(
        self, x: Tensor, mask: Tensor | None, starts: Tensor | None, bounds: Tensor | None, *, rows: bool
    ) -> Packing | None:
        """The packing of x into one row, or None if x stays as it is. With `rows`, each row must be one sequence."""
        if mask is None and starts is None:
            return None
        starts = None if starts is None else starts.expand(x.shape[:2])
        packing = Packing.of(x, None if mask is None else mask[:, -x.shape[1] :], starts)
        if packing is None:
            return None
        if bounds is not None:
            raise ValueError("give cu_seqlens or padding in attention_mask, not both")
        if rows and len(packing.cu_seqlens) != len(x) + 1:
            raise ValueError("attention_mask: where a cache is kept, each row needs a token that is no padding")
        return packing


class DeltaLabForCausalLM(DeltaLabModel, GenerationMixin):
    """A deltalab `Model` with the interface of `transformers`: losses, `generate()`, saving and loading.

    Attributes:
        z_loss: The weight of the squared logarithm of softmax's denominator in the loss of training.
        token_graphs: What computes tokens one by one as CUDA graphs, on one GPU; None computes them without.
    """

    token_graphs: TokenGraphs | None
    accepts_loss_kwargs = True

    def __init__(self, config: DeltaLabConfig) -> None:
        super().__init__(config)
        self.z_loss = 0.0
        self.token_graphs = TokenGraphs()

    def get_output_embeddings(self) -> nn.Module | None:
        """Returns the output matrix; None if it is tied to the embedding."""
        return self.model.unembed

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the output matrix."""
        self.model.unembed = cast(nn.Linear, new_embeddings)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes a StateCache

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the inputs of `forward` for the next tokens of `generate`."""
        # `generate` accepts embeddings only if this method has a parameter of their name.
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        # Layers count tokens by themselves. transformers 5.0 gives cache_position to every model.
        for name in ("position_ids", "cache_position"):
            inputs.pop(name, None)
        return inputs

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **shifted: Tensor,
    ) -> CausalLMOutputWithPast:
        """Computes the logits [B, T, vocab] after tokens [B, T] or their embeddings [B, T, d], or the loss.

        With labels in training mode there are no logits: the loss is computed chunk by chunk, which saves the memory of
        all logits.

        Args:
            input_ids: The tokens [B, T]; None with `inputs_embeds`.
            attention_mask: 0 marks padding, at any place, [B, T] or [B, all columns so far]. The other tokens of a row
                give what they would give without the padding. Padding has the logits of the last token before it in its
                row, so that `generate` goes on from that token, or 0 if there is no such token.
            past_key_values: The cache that an earlier call returned; this call updates it in place.
            inputs_embeds: The embeddings [B, T, d]; None with `input_ids`.
            labels: The tokens themselves [B, T], which this method shifts. -100 does not count, and neither does the
                first token of a sequence.
            use_cache: Whether to make a cache and return it.
            logits_to_keep: How many of the last positions get logits; 0 means all.
            num_items_in_batch: The divisor of the sum of the losses; None means their number.
            skip_logits: Whether to return the loss alone, for which the logits of all tokens are never held at once;
                None means yes in training with labels.
            position_ids: Positions [B, T]. A sequence starts where they do not rise. Nothing else is read from them,
                and nothing at all if a cache is kept.
            seq_idx: Numbers of sequences [B, T]. A sequence starts where they change. They are not read if a cache is
                kept.
            cu_seqlens: The bounds [N + 1] of sequences packed in one row.
            cu_seq_lens_q: Another name of `cu_seqlens`.
            cu_seq_lens_k: Not read: it comes with `cu_seq_lens_q` for attention kernels.
            max_length_q: Not read, for the same reason.
            max_length_k: Not read, for the same reason.
            output_attentions: Must be false: there are none.
            output_hidden_states: Whether to return the embeddings, what each block but the last returns, and the
                vectors after the last norm.
            **shifted: `shift_labels`, the token to predict after each token, [B, T], in place of shifted `labels`. It
                is no argument of its own, because transformers asks a Trainer's batches for all arguments with
                "label" in their names.

        Raises:
            TypeError: If there is another argument.
            ValueError: If inputs contradict each other, or if attentions are asked for.
        """
        targets = shifted.pop("shift_labels", None)
        if shifted:
            raise TypeError(f"forward() got an unexpected keyword argument '{next(iter(shifted))}'")
        others = (inputs_embeds, labels, cu_seqlens, cu_seq_lens_q)
        if all(other is None for other in others) and not output_hidden_states and not output_attentions:
            token_logits = self._token(input_ids, attention_mask, past_key_values)
            if token_logits is not None:
                return CausalLMOutputWithPast(logits=token_logits, past_key_values=past_key_values)
        read = self._read(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            position_ids=position_ids,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            cu_seq_lens_q=cu_seq_lens_q,
            output_attentions=output_attentions,
        )
        hidden, packing, bounds = read.hidden, read.packing, read.bounds
        logits: Tensor | None
        if labels is None:
            logits, loss = self.model.logits(read.spread(hidden)[:, -logits_to_keep:]), None
        else:
            given = labels if targets is None else targets
            given = given if packing is None else packing.pack(given)
            targets = _targets(given, bounds) if targets is None else given
            default_loss = self.loss_function is ForCausalLMLoss
            if (self.training and default_loss) if skip_logits is None else skip_logits:
                z = self.z_loss if self.training else 0.0
                logits, loss = None, self.model.cross_entropy(hidden, targets, count=num_items_in_batch, z=z)
            else:
                logits = self.model.logits(hidden)
                loss = self.loss_function(
                    logits=logits,
                    labels=None,
                    shift_labels=targets,
                    vocab_size=logits.shape[-1],
                    num_items_in_batch=num_items_in_batch,
                )
                logits = read.spread(logits)[:, -logits_to_keep:]
            if read.balance is not None:
                # This call's share of the batch whose losses are divided by num_items_in_batch.
                share = 1 if num_items_in_batch is None else (targets != -100).sum() / num_items_in_batch
                loss = loss + read.balance * share
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=read.cache, hidden_states=read.states)

    def _token(self, tokens: Tensor | None, mask: Tensor | None, cache: StateCache | None) -> Tensor | None:
        """Computes the logits [B, 1, vocab] of one more token of each row as a CUDA graph; None where there is none."""
        if tokens is None or tokens.dim() != 2 or tokens.shape[1] != 1:
            return None
        if self.token_graphs is None or not isinstance(cache, StateCache) or not cache.states:
            return None
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if mask is not None and not mask[:, -1].all():
            return None
        logits = self.token_graphs.token(self, self.model.step, tokens, cache)
        if logits is not None:
            cache.seen += 1
        return logits


class DeltaLabForSequenceClassification(DeltaLabModel):
    """Scores W h_T [B, num_labels] of the last token h_T of each row, and their loss, as `transformers` has it."""

    def __init__(self, config: DeltaLabConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initializes the parameters that the checkpoint lacks, the scores from a normal distribution."""
        super().initialize_weights()
        if not getattr(self.score.weight, "_is_hf_initialized", False):
            nn.init.normal_(self.score.weight, std=self.config.d_model**-0.5)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **more: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Computes the scores of each row.

        Args:
            input_ids: The tokens [B, T]; None with `inputs_embeds`.
            attention_mask: 0 marks padding, at any place, [B, T]. Rows of several lengths need it.
            inputs_embeds: The embeddings [B, T, d]; None with `input_ids`.
            labels: The class of each row, or its number if `num_labels` is 1, [B].
            output_hidden_states: Whether to return the vectors after each block.
            **more: As in `DeltaLabModel.forward`.

        Raises:
            ValueError: Inputs contradict each other.
        """
        read = self._read(input_ids, attention_mask, None, inputs_embeds, False, output_hidden_states, **more)
        # Padding has the vector of the last token before it.
        scores = self.score(read.spread(read.hidden)[:, -1])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=scores, config=self.config)
            loss = loss if read.balance is None else loss + read.balance
        return SequenceClassifierOutputWithPast(loss=loss, logits=scores, hidden_states=read.states)


def _watched(call: Callable[..., Any] | None, between: list[Tensor]) -> Callable[..., Any]:
    """Returns a function that calls a block, by `call` if there is one, and notes what it returns."""

    def watched(block: Block, *inputs: Any) -> Any:
        x, branch, cache = block(*inputs) if call is None else call(block, *inputs)
        between.append(x + branch)
        return x, branch, cache

    return watched


def _starts(position_ids: Tensor | None, seq_idx: Tensor | None) -> Tensor | None:
    """Marks [B, T] the tokens, other than the first of a row, at which sequences start; None without either input."""
    if position_ids is None and seq_idx is None:
        return None
    starts = []
    if position_ids is not None:
        starts.append(position_ids[:, 1:] <= position_ids[:, :-1])
    if seq_idx is not None:
        starts.append(seq_idx[:, 1:] != seq_idx[:, :-1])
    return F.pad(torch.stack(starts).any(0), (1, 0))


def _targets(labels: Tensor, bounds: Tensor | None) -> Tensor:
    """The token that follows each token, [B, T], and -100 for the last of a sequence."""
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    return targets if bounds is None else targets.index_fill(1, bounds[1:].long() - 1, -100)
