"""A model as data: its rule, its sizes and the layout of its layers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from deltalab.errors import InputError, unknown
from deltalab.models.rule_inputs.first_values import RANK
from deltalab.models.settings.layer_list import ATTENTION, RULE, Layer
from deltalab.models.settings.spec_checks import check_spec
from deltalab.ops.fused.norm import EPS
from deltalab.ops.peers.scans import PACKAGES
from deltalab.ops.peers.table import hindrance
from deltalab.ops.recurrence import Backend
from deltalab.own_module import OwnModule, as_rule
from deltalab.registry import get_rule
from deltalab.rule import UpdateRule

MIXER = "mixer"
"""A key of a model that names a module in place of a rule: {module: ..., kwargs: {...}}."""

TIED_WIDTH = 64
"""The width up to which tied logits have the factor d_model ** -0.5; above it, the factor is 8 / d_model."""

LATER = {"since": "0.2"}
"""Marks a setting that the first release lacks. At its default, the setting does not change the key of a trial."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model, as data.

    Attributes:
        vocab_size: The number of tokens that the model tells apart.
        rule: The name of a rule, or {name: ..., knob: ...}.
        d_model: The width of each layer.
        layers: A number of layers, or a list of the layers from first to last. An entry of the list is `rule`, which
            stands for the model's rule; the name of another rule; {name: ..., knob: ..., layer: {setting: ...}}, where
            `layer` changes settings of `OF_A_BLOCK` in this layer alone; {module: ..., kwargs: {...}}, a module of any
            author; or {repeat: n, pattern: [entry, ...]}. A list has an entry for each block, also with `mamba` blocks.
        heads: The heads of each layer.
        key_dim: The width of a head's keys; None for d_model / heads.
        expand_v: The width of a head's values over the width of its keys.
        conv: The width of the short convolution over q, k and v; 0 for none.
        qk_heads: The heads that have their own q and k, which groups of value heads share (grouped value attention).
            None is `heads`, or 1 in `mamba` blocks. Divides `heads`.
        kv_heads: The heads that have their own k and v, which groups of query heads share (grouped-query attention).
            None is `heads`. Divides `heads`, and does not go with a smaller `qk_heads`.
        qk_norm: Whether each head's q and k get an RMS norm with weights, before the unit norm of rules that have one.
        rope: Whether q and k have rotary positions. A number is their base, and true is a base of 10000.
        rope_dim: The last channels of each head's q and k that have the rotary positions, an even number; None for all.
            With `kv_rank` all heads share these channels of k, which come from x and not from the latent, also without
            `rope`.
        q_rank: The width of the latent that q of all heads comes from, q = W_q norm(W_c x) with an RMS norm with
            weights; None for q = W_q x.
        kv_rank: The width r of the latent c = norm(W_c x) that k = W_k c and v = W_v c of all heads come from
            (multi-head latent attention). None for k and v from x. The layers of `attention` then hold r + rope_dim
            numbers for each token, if they have neither `conv`, `canon` B, `qk_norm` nor `features`, and positions only
            in `rope_dim`; else, they hold k and v.
        token_shift: Whether q, k, v, the gates and the output gate each read a learned mean of x_t and x_{t-1} (RWKV).
            With true, one mean is for all gates of the rule; with `each`, every one has its own (RWKV-7). With
            {rank: r}, these means also depend on the token, through r channels (RWKV-6).
        output_norm: The norm of each head's output, a kind of `ops.fused.norm.HeadNorm`: none (or false), rms (or
            true), rms_unweighted, rms_all, rms_all_of_silu (GSA), layer, layer_all (TTT), group.
        output_gate: The function of W x that multiplies the normed output: none (or false), sigmoid (or true), silu
            (swish), linear. With sigmoid_before_norm and silu_before_norm, it multiplies before the norm (Mamba2).
        gate_rank: The width r of the output gate's projection W_1 W_2 x through r channels; None for one matrix, 0 for
            the width of a head's values (KDA).
        features: The activation of q, k and v after their convolution, a kind of `FEATURES`: unit (SiLU and unit norm
            on q and k, SiLU on v), silu (SiLU on all three), unit_qk and silu_qk (the same without SiLU on v), raw (no
            activation). None is that of the rule.
        scale: The factor of each head's output; None for that of the rule, which is K ** -0.5 for nearly all rules.
        low_rank_bias: Whether the second matrix of each projection W_1 W_2 x (of a gate's rank, or of `gate_rank`) has
            a bias; or a list of those that have one, by the symbols of gates and `output_gate`: [a].
        low_rank_activation: The function, tanh or sigmoid, between the two matrices of such projections:
            {g: tanh, output_gate: sigmoid} (RWKV-7). None for none.
        conv_bias: Whether the short convolution has a bias, which starts as its weights do.
        skip: Whether each head's output gets D v, with a learned D that starts at 1 (Mamba2).
        bonus: Whether each head's normed output gets (w * r_t * k_t) v_t, with a learned w [K] that starts at 0, for
            the r that reads the state and the k that is written (RWKV-7).
        beside: A second mixer that reads the same input: a rule, or an entry as in `layers`, which may change settings
            of a layer. The output is the mean of both, each with an RMS norm with weights (heads of two rules side by
            side: Hymba). None for none. Layers of `attention` have none.
        block: `transformer` is [mixer, MLP]. `mamba` is [mixer] alone, with q and k shared by all heads, and twice the
            depth.
        mlp: The MLP of `transformer` blocks: swiglu (or true), relu2, W_2 relu(W_1 x)^2 (Primer, RWKV-7), gated_relu2,
            which multiplies this by sigmoid(W_g x) (RWKV-6), or false for none, as in `mamba` blocks.
        mlp_width: The hidden width of the MLP; None for 8/3 d_model, 4 d_model with relu2, or 7/2 d_model with
            gated_relu2, rounded up to a multiple of 8.
        mlp_shift: Whether the MLP reads a learned mean of x_t and x_{t-1}, and its gate in gated_relu2 another (RWKV).
        experts: A mixture of experts in place of each SwiGLU, {count: 8, top: 2, shared: 1, width: null, balance: 0.01}
            or some of these. None for none. Each token uses the `top` of `count` experts that its router weighs most,
            with weights that sum to 1, and all `shared` ones. `width` is the hidden width of an expert. If it is null,
            those that a token uses have the width of the SwiGLU together, rounded up to a multiple of 8. `balance` is
            the weight of the balance loss in the loss that is trained on. No token is dropped. Time grows with `count`.
        canon: Where each block has canon layers, x_t + sum_i w_i x_{t-i} over four tokens: A before the mixer, B on q,
            k and v before `conv` (if there is one) and the activation, C before the MLP, D before the MLP's activation.
        attention_residuals: What each mixer and MLP reads. 0 is the sum of the embedding and of all outputs before. A
            number n is an attention over depth: a mean of the embedding, of the sum of each n outputs before, and of
            the sum of those since, with softmax weights that each reader learns. 1 weighs each output (Kimi 2026).
        value_residual: What the values of each layer but the first have of the first layer's, own v_l + first v_1,
            after convolution and activation: {first: 0.5, own: 0.5, learned: true} or some of these (ResFormer).
            Learned shares start there. With {rank: r}, they are v_l + s (v_1 - v_l), where s = sigmoid(W_1 W_2 x + c)
            goes through r channels (RWKV-7). None for v_l alone.
        norm: The norm before each mixer, each MLP and the logits: `rms`, with weights, or `layer`, with weights and
            biases.
        first_norm: Whether the embedding goes through such a norm before the first block (RWKV).
        norm_eps: The number that all norms add to a mean square.
        init_std: The standard deviation at which all matrices inside of the blocks start, over sqrt(2 x blocks) for the
            last matrix of a mixer and of an MLP (GPT-2, 0.02). None is inputs ** -0.5, with the same factor.
        base_width: The d_model W that `train.lr` is meant for (muP). So that a step moves activations of all widths
            alike, training scales the rate of every matrix that d_model channels enter by W / d_model, and logits
            shrink with W / d_model. A model of width W is the same without a base_width. None scales nothing.
        attention: The layers, counted from 0, that are softmax attention and not the rule, or
            `second_to_last_of_every_eight`. Needs a number of `layers`, because a list names its attention itself.
        window: The tokens that the layers of `attention` see; 0 for all. Needs a number of `layers`.
        tie_embeddings: Whether input and output embeddings are one matrix. The logits of a tied model have the factor
            d_model ** -0.5, or 8 / d_model above width 64, so that the logit of the token that was just read starts
            below 8.
        logit_cap: The bound c of the logits c tanh(l / c) (Gemma 2 has 30); None for none.
        readout: `position` reads a position's logits from its own hidden state. `last` reads them by an MLP from the
            position and the last hidden state of the sequence.
        chunk_size: The tokens of a chunk in the parallel form.
        backend: The code that runs the rules' recurrences: `auto`, or another of `scan`. `fla` and `flash_qla` are the
            kernels of flash-linear-attention and of FlashQLA, on a GPU, for rules whose structure they have. Layers of
            other rules, such as attention, take `auto`.
        patches: The rows and columns of an image's patches, and the numbers of a patch: inputs are then images
            [B, rows columns, numbers], `vocab_size` counts classes, and input and output are not tied. None for tokens.
        positions: What an embedded patch is told of its place: `learned`, or fixed sines and cosines of row and column,
            `sincos`.
        pool: What the class of an image is read from: the `mean` of all patches, or the `last` one.
        bidirectional: Whether each block scans an image from its last patch to the first, too. All scans of a block
            share its mixer, and their outputs are averaged.
        axes: 2 if each block scans an image column by column, too; 1 for row by row alone.

    Raises:
        InputError: The values make no model.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    vocab_size: int
    rule: str | Mapping[str, Any]
    d_model: int = 64
    layers: int | tuple[Layer, ...] = 2
    heads: int = 2
    key_dim: int | None = None
    expand_v: float = 1.0
    conv: int = 4
    qk_heads: int | None = field(default=None, metadata=LATER)
    kv_heads: int | None = field(default=None, metadata=LATER)
    qk_norm: bool = field(default=False, metadata=LATER)
    rope: bool | float = field(default=False, metadata=LATER)
    rope_dim: int | None = field(default=None, metadata=LATER)
    q_rank: int | None = field(default=None, metadata=LATER)
    kv_rank: int | None = field(default=None, metadata=LATER)
    token_shift: bool | str | Mapping[str, int] = field(default=False, metadata=LATER)
    output_norm: bool | str = True
    output_gate: bool | str = True
    gate_rank: int | None = field(default=None, metadata=LATER)
    features: Literal["unit", "unit_qk", "silu", "silu_qk", "raw"] | None = field(default=None, metadata=LATER)
    scale: float | None = field(default=None, metadata=LATER)
    low_rank_bias: bool | tuple[str, ...] = field(default=False, metadata=LATER)
    low_rank_activation: Mapping[str, Literal["tanh", "sigmoid"]] | None = field(default=None, metadata=LATER)
    conv_bias: bool = field(default=False, metadata=LATER)
    skip: bool = field(default=False, metadata=LATER)
    bonus: bool = field(default=False, metadata=LATER)
    beside: str | Mapping[str, Any] | None = field(default=None, metadata=LATER)
    block: Literal["transformer", "mamba"] = "transformer"
    mlp: bool | str = True
    mlp_width: int | None = field(default=None, metadata=LATER)
    mlp_shift: bool = field(default=False, metadata=LATER)
    experts: Mapping[str, Any] | None = field(default=None, metadata=LATER)
    canon: tuple[Literal["A", "B", "C", "D"], ...] = field(default=(), metadata=LATER)
    attention_residuals: int = field(default=0, metadata=LATER)
    value_residual: Mapping[str, Any] | None = field(default=None, metadata=LATER)
    norm: Literal["rms", "layer"] = field(default="rms", metadata=LATER)
    first_norm: bool = field(default=False, metadata=LATER)
    norm_eps: float = field(default=EPS, metadata=LATER)
    init_std: float | None = field(default=None, metadata=LATER)
    base_width: int | None = field(default=None, metadata=LATER)
    attention: tuple[int, ...] | Literal["second_to_last_of_every_eight"] = field(default=())
    window: int = 0
    tie_embeddings: bool = True
    logit_cap: float | None = field(default=None, metadata=LATER)
    readout: Literal["position", "last"] = "position"
    chunk_size: int = 64
    backend: Backend = field(default="auto", metadata=LATER)
    patches: tuple[int, int, int] | None = field(default=None, metadata=LATER)
    positions: Literal["learned", "sincos"] = field(default="learned", metadata=LATER)
    pool: Literal["mean", "last"] = field(default="mean", metadata=LATER)
    bidirectional: bool = field(default=False, metadata=LATER)
    axes: Literal[1, 2] = field(default=1, metadata=LATER)

    def __post_init__(self) -> None:
        check_spec(self)

    @classmethod
    def of(cls, given: "ModelSpec | Mapping[str, Any]") -> "ModelSpec":
        """Makes a specification from a mapping.

        Raises:
            InputError: A key does not exist, or a key is missing.
        """
        if isinstance(given, ModelSpec):
            return given
        if not isinstance(given, Mapping):
            raise InputError(f"model must be a mapping with vocab_size and rule, not {given!r}")
        if "preset" in given:
            # Import late, as below.
            from deltalab.models.hybrids import find_hybrid, with_hybrid

            if "rule" in given:
                raise InputError("model.preset names the rules of its layers: leave rule out")
            given = {"rule": find_hybrid(given["preset"]).rule, **with_hybrid(given)}
        if MIXER in given:
            if "rule" in given:
                raise InputError(f"model.{MIXER} stands in place of a rule: give one of them")
            given = {key: value for key, value in given.items() if key != MIXER} | {
                "rule": as_rule(given[MIXER], f"model.{MIXER}")
            }
        names = [f.name for f in fields(cls)]
        for key in given:
            if key not in names:
                raise unknown("model key", key, [*names, MIXER, "preset"])
        for key in ("vocab_size", "rule"):
            if key not in given:
                raise InputError(f"model: needs {key}")
        rule, settings = given["rule"], {key: value for key, value in given.items() if key != "rule"}
        if "@" in str(rule):
            # Import late: a preset is written out in the settings of this class. An exported folder, whose registry
            # holds the rules of its model alone, has none.
            from deltalab.models.published import written_out

            rule, settings = written_out(rule, settings)
        made = cls(**settings, rule=rule)
        if made.value_residual is not None and made.depth == 1:
            raise InputError("model.value_residual has no effect in one layer, which has no other before it")
        if made.backend in PACKAGES:
            # Layers of other rules, such as attention, take `auto`.
            of_algebra = [rule for rule in made.rules() if rule.transition is not None]
            for one in of_algebra or made.rules()[:1]:
                if why := hindrance(one):
                    raise InputError(f"model.backend '{made.backend}': {why}", key="model.backend")
        return made

    def make_rule(self) -> UpdateRule:
        """Returns the rule with its knobs set."""
        if isinstance(self.rule, str):
            return get_rule(self.rule)
        if not isinstance(self.rule, Mapping) or not isinstance(self.rule.get("name"), str):
            raise InputError(f"rule must be a name or {{name: ..., knob: ...}}, not {self.rule!r}")
        knobs = {key: value for key, value in self.rule.items() if key != "name"}
        return get_rule(self.rule["name"], **knobs)

    def foreign(self) -> bool:
        """Returns whether a layer is a module of another author."""
        return any(isinstance(rule, OwnModule) for rule in self.rules())

    def rules(self) -> list[UpdateRule]:
        """Returns the different rules of the layers, first the rule of `make_rule`."""
        rules = [self.make_rule()]
        if isinstance(self.layers, int):
            rules += [get_rule(ATTENTION, window=self.window)] if self.attention else []
            blocks = [self]
        else:
            blocks = [self.at(layer) for layer in self._first_of_each_kind()]
        for block in blocks:
            for other in (block, block.second()):
                if other is not None and (rule := other.make_rule()) not in rules:
                    rules.append(rule)
        return rules

    def kinds(self) -> list[tuple[int, "ModelSpec"]]:
        """Lists the different blocks: how many there are, and a model of such blocks alone, with a vocabulary of 1.

        A value residual, which adds `value_shares` parameters to a model and is of no block alone, is left out. So is
        the backend, because blocks are counted where there may be no GPU.
        """
        alike, counts = dict[str, ModelSpec](), Counter[str]()
        for layer, count in self._first_of_each_kind().items():
            block = replace(self.at(layer), vocab_size=1, value_residual=None, backend="auto")
            alike.setdefault(repr(block), block)
            counts[repr(block)] += count
        return [(counts[key], block) for key, block in alike.items()]

    def _first_of_each_kind(self) -> dict[int, int]:
        """Returns the first layer of each entry of `layers`, and how many layers have that entry.

        A specification is made in a millisecond, and a model may have 1,000 layers of two entries.
        """
        entries = [
            self.is_attention(n) if isinstance(self.layers, int) else repr(self.layers[n]) for n in range(self.depth)
        ]
        counts = Counter(entries)
        return {entries.index(entry): count for entry, count in counts.items()}

    def at(self, layer: int) -> "ModelSpec":
        """Returns the specification of a model in which every block is like the block of `layer`, counted from 0."""
        values = self.value_residual if layer else None
        plain = replace(self, layers=1, attention=(), window=0, value_residual=values)
        if isinstance(self.layers, int):
            attention = {"name": ATTENTION, "window": self.window}
            return replace(plain, rule=attention, beside=None) if self.is_attention(layer) else plain
        entry = self.layers[layer]
        if isinstance(entry, str):
            return plain
        knobs = {key: value for key, value in entry.items() if key != "layer"}
        try:
            return replace(plain, rule=self.rule if entry["name"] == RULE else knobs, **entry.get("layer", {}))
        except InputError as error:
            raise InputError(f"model.layers[{layer}]: {error}") from None

    def second(self) -> "ModelSpec | None":
        """Returns the specification of the mixer that stands beside the rule; None if there is none."""
        if self.beside is None:
            return None
        entry: Mapping[str, Any] = {"name": self.beside} if isinstance(self.beside, str) else self.beside
        knobs = {key: value for key, value in entry.items() if key != "layer"}
        plain = replace(self, layers=1, attention=(), window=0, beside=None)
        try:
            return replace(plain, rule=self.rule if entry["name"] == RULE else knobs, **entry.get("layer", {}))
        except InputError as error:
            raise InputError(f"model.beside: {error}") from None

    @property
    def value_shares(self) -> int:
        """The number of parameters of a value residual, in all layers that have it."""
        given = self.value_residual
        if given is None:
            return 0
        of_layer = (self.value_flops + self._values) if RANK in given else 2 if given["learned"] else 0
        return (self.depth - 1) * of_layer

    @property
    def value_flops(self) -> int:
        """The products of a value residual's matrices for each token, in one layer."""
        if self.value_residual is None or RANK not in self.value_residual:
            return 0
        rank: int = self.value_residual[RANK]
        return rank * (self.d_model + self._values)

    @property
    def _values(self) -> int:
        """The numbers of v for each token."""
        first = self.at(0)
        return (first.kv_heads or first.heads) * first.head_dims[1]

    @property
    def depth(self) -> int:
        """The number of blocks. A number of `layers` is doubled for `mamba`, whose blocks have a mixer and no MLP."""
        if not isinstance(self.layers, int):
            return len(self.layers)
        return self.layers * (2 if self.block == "mamba" else 1)

    @property
    def head_dims(self) -> tuple[int, int]:
        """The widths of a head's keys and values, K and V."""
        key_dim = self.key_dim or self.d_model // self.heads
        return key_dim, max(1, round(key_dim * self.expand_v))

    @property
    def of_module(self) -> dict[str, float]:
        """What the arguments of a module may name: see `own_module.OF_A_MODEL`."""
        key_dim, value_dim = self.head_dims
        return {
            "chunk_size": self.chunk_size,
            "d_model": self.d_model,
            "heads": self.heads,
            "key_dim": key_dim,
            "norm_eps": self.norm_eps,
            "value_dim": value_dim,
        }

    @property
    def tied_factor(self) -> float:
        """The factor of logits from tied embeddings, on embeddings of unit scale."""
        width = self.base_width or self.d_model
        # Recall is learned fastest from embeddings of unit scale, and the factor gives logits unit scale too. At the
        # start, the logit of the token that was just read is d times the factor. In a wide model the factor bounds this
        # logit, because e^sqrt(d) would outweigh the whole vocabulary.
        factor = float(width**-0.5 if width <= TIED_WIDTH else TIED_WIDTH**0.5 / width)
        # Training aligns hidden states with embeddings, so that their products grow with the width itself.
        return factor * self.width_share

    @property
    def width_share(self) -> float:
        """The factor W / d_model by which training scales the rate of matrices; 1 without a `base_width` W."""
        return 1.0 if self.base_width is None else self.base_width / self.d_model

    def is_attention(self, layer: int) -> bool:
        """Returns whether a layer, counted from 0, is softmax attention."""
        if isinstance(self.attention, str):
            return layer % 8 == 6
        return layer in self.attention

    @property
    def balances(self) -> bool:
        """Whether the loss that is trained on has a balance loss of experts."""
        return self.experts is not None and self.experts["balance"] > 0

    @property
    def more_than_x(self) -> str | None:
        """The setting by which blocks hand on more than x, to one another or to the loss; None if there is none."""
        handed = {
            "attention_residuals": self.attention_residuals,
            "experts.balance": self.balances,
            "value_residual": self.value_residual,
        }
        return next((name for name, given in handed.items() if given), None)

    @property
    def own_qk_heads(self) -> int:
        """The number of heads that have their own q."""
        return self.qk_heads or (1 if self.block == "mamba" else self.heads)
