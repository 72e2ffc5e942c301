"""A deltalab model with any rule as a model of `transformers`; `export.hf` copies this file into each export."""

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from deltalab.models.layer import LayerCache, initialize
from deltalab.models.model import Block, Model
from deltalab.models.spec import ModelSpec


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
        """The number of blocks, which `layers` may list."""
        return self.spec().depth

    def spec(self) -> ModelSpec:
        return ModelSpec.of({f.name: getattr(self, f.name) for f in fields(ModelSpec)})


class StateCache(Cache):
    """The memory of all layers: the last inputs of their convolutions, and their states.

    Its size is constant for a recurrent rule; attention layers add the keys and values of every token. It cannot forget
    the last tokens again.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[LayerCache] = []
        self.seen = 0

    def numel(self) -> int:
        return sum(state.numel() for state in self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("a recurrent state cannot give its last tokens back")

    def reset(self) -> None:
        self.states, self.seen = [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda part: part[indices.to(part.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda part: part.repeat_interleave(repeats, dim=0))

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.states = [now.map(change) for now in self.states]


class DeltaLabForCausalLM(PreTrainedModel, GenerationMixin):
    """A deltalab `Model` with the interface of `transformers`: losses, `generate()`, saving and loading."""

    config_class = DeltaLabConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = True
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    # Half precision would round a decay exp(-a dt) near 1 to 1.
    _keep_in_fp32_modules_strict = ["learned"]  # noqa: RUF012

    def __init__(self, config: DeltaLabConfig) -> None:
        super().__init__(config)
        self.model = Model(config.spec())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.unembed

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.unembed = cast(nn.Linear, new_embeddings)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes a StateCache

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("cache_position", None)  # transformers 5.0 gives it to every model
        return inputs

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Starts parameters that the checkpoint lacks as deltalab does, from the seed of torch."""
        missing = {n: p for n, p in self.model.named_parameters() if not getattr(p, "_is_hf_initialized", False)}
        if missing:
            with torch.device("cpu"):
                fresh = Model(self.config.spec())
            initialize(fresh, torch.initial_seed())
            for name, value in missing.items():
                value.copy_(fresh.get_parameter(name))

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
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocab] after tokens [B, T] or their embeddings [B, T, d].

        logits_to_keep: how many of the last positions get logits, 0 for all.
        labels [B, T]: the tokens themselves, which are shifted here; -100 does not count.
        past_key_values: the cache that an earlier call returned; it is updated in place.
        attention_mask [B, T]: 0 marks padding. Padding before the text is blanked and leaves no trace in the state.
            Padding after the text is ignored, and refused where a cache is kept.

        Raises `ValueError` for padding that would reach the state, and for attentions or hidden states.
        """
        if output_attentions or output_hidden_states:
            raise ValueError("a deltalab model returns neither attentions nor hidden states")
        if past_key_values is not None and not isinstance(past_key_values, StateCache):
            raise ValueError(f"past_key_values must be a StateCache, not a {type(past_key_values).__name__}")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        cache = StateCache() if use_cache and past_key_values is None else past_key_values
        if attention_mask is not None:
            x = self._blank(x, attention_mask, cache)
        hidden, states = self.model.transform(x, cache.states if cache is not None and cache.states else None)
        if cache is not None:
            cache.states, cache.seen = states, cache.seen + x.shape[1]
        logits = self.model.logits(hidden[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _blank(self, x: Tensor, mask: Tensor, cache: StateCache | None) -> Tensor:
        """Embeddings x with zeros where padding stands before the text."""
        if mask.dim() != 2:
            raise ValueError(f"attention_mask must be [B, T], not {list(mask.shape)}")
        mask = mask[:, -x.shape[1] :].bool()
        if mask.all():
            return x
        if cache is None and (mask[:, 1:] <= mask[:, :-1]).all():
            return x
        if not (mask[:, 1:] >= mask[:, :-1]).all() or (cache is not None and cache.seen):
            raise ValueError("attention_mask: padding must stand before the text, or after it where no cache is kept")
        if not self._blanks_leave_no_trace:
            raise ValueError(
                "attention_mask: some layers of this model would remember padding that stands before the text "
                "(attention and RoPE do): give prompts of one length"
            )
        return x * mask[..., None]

    @cached_property
    def _blanks_leave_no_trace(self) -> bool:
        """Whether a token of zeros leaves every layer's empty state as it is, so that it counts as no token."""
        blank = self.model.embed.weight.new_zeros(1, 1, self.config.d_model)
        with torch.no_grad():
            hidden, states = self.model.transform(blank)
        left = [hidden, *(part for state in states for part in (state.conv, state.place, state.last))]
        for block, after in zip(self.model.blocks, states, strict=True):
            mixer = cast(Block, block).mixer
            k, v = (blank.new_zeros(1, 1, mixer.heads, size) for size in (mixer.key_dim, mixer.value_dim))
            for empty, now in zip(mixer.rule.start(k, v), after.state, strict=True):
                if empty.shape != now.shape:
                    return False
                left.append(now - empty)
        return not any(part.any() for part in left)
