"""A pretrained model of any size through a fixed amount of memory.

Covers opening a folder, the forward pass, the loss per token, and every branch of every layer as a function
of the residual stream; pointing the tensors of one branch at those of another. The model is the class of the
installed ``transformers`` release; its matrices read themselves from disk when they are called
(``layers.py``), all texts together, so that a forward pass reads every weight once. Everything is
computed in float32. Not covered: padding, caches, generation, gradients, training.

Shapes: B texts, T positions, C channels of the residual stream, H heads, V tokens in the vocabulary, N = B·T.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from twinscope.lab.budget import rss_mib
from twinscope.lab.errors import ConfigError, DataError
from twinscope.models.streamed.budget import MIB, PassLimit, PassSizes, first_pass_mib
from twinscope.models.streamed.build import (
    DELTA_BYTES,
    Built,
    build,
    load_resident,
    read_config,
    resident_keys,
)
from twinscope.models.streamed.families import KINDS, BranchNames, known_layout, layout_of
from twinscope.models.tensor_files import open_tensors

Result = TypeVar("Result")
#: Sites of two kinds that hold the same thing: a gain over the channels of a head.
_EXCHANGEABLE = {"self_attn.q_norm", "self_attn.k_norm"}


@dataclass(frozen=True)
class Point:
    """The residual stream ``z (B, T, C)`` that enters a site, before its pre-norm."""

    site: str
    z: Tensor


@dataclass(frozen=True)
class Branch:
    """What a site adds to the residual stream ``(B, T, C)``; ``probabilities (B, H, T, T)`` if asked for."""

    update: Tensor
    probabilities: Tensor | None = None


class StreamedLM:
    """A causal language model whose weights stay on disk; :func:`open_streamed` makes one.

    ``layers``, ``width`` (C), ``vocab`` (V), ``family`` (the library's ``model_type``), ``config`` (the
    library's object), ``folder``; ``notes`` says what was decided where configuration and files disagree.
    ``files`` are the tensors (``models/tensor_files.py``).
    """

    def __init__(self, folder: Path, built: Built, budget_mib: float | None) -> None:
        self.folder = folder
        self.config = built.config
        self.family = built.family
        self.notes = built.notes
        self.files = built.reader.files
        self.width = int(built.config.hidden_size)
        self.vocab = int(built.shapes[built.head_key][0])
        self.budget_mib = budget_mib
        self._built = built
        self._layout = layout_of(built.family)
        self.layers = int(built.config.num_hidden_layers)
        self._home = dict(built.reader.sources)
        self._remapped: dict[str, str] = {}
        self._with_norm = True
        self._opened_mib = rss_mib()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and close the files; nothing can be computed from then on."""
        self._built.reader.close()

    def sites(self, kind: str) -> list[str]:
        """The sites of a kind in order: ``attention | linear_attention | mlp | q_norm | k_norm``.

        Raises:
            ConfigError: no such kind, or a family whose layers are not known.
        """
        if kind not in KINDS:
            raise ConfigError(f"no kind of site '{kind}': use one of {', '.join(KINDS)}")
        part = KINDS[kind]
        return [f"layers.{n}.{part}" for n in range(self.layers) if self._find(n, part) is not None]

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """Token ids ``(B, T)`` to the final states ``(B, T, C)``, the library's ``last_hidden_state``.

        All texts go through together, as far as the budget has room for them.

        Raises:
            DataError: ids outside the vocabulary or more than the model reads; NaN, infinite or missing
                weights; a file that changed while it was open.
            BudgetExceeded: the process outgrew the budget.
        """
        groups = self._together(self._checked(ids))
        with self._reading("hidden", len(groups), self._matrices()):
            return _joined([self._states(part) for part in groups])

    @torch.no_grad()
    def nll(self, ids: Tensor) -> Tensor:
        """Token ids ``(B, T)`` to nats ``(B, T − 1)``: −log p of token t + 1 given tokens 0 … t.

        The head is multiplied in blocks of the vocabulary with a running log-sum-exp; the sum of exponentials
        is kept in float64. Its mean is the loss of the library.

        Raises:
            DataError, BudgetExceeded: as for :meth:`hidden`; a text of one token predicts nothing.
        """
        ids = self._checked(ids)
        if ids.shape[1] < 2:
            raise DataError("a text of one token predicts no other: give texts of two tokens or more")
        groups = self._together(ids)
        with self._reading("nll", len(groups), [*self._matrices(), self._built.head_key]):
            return _joined([self._losses(self._states(part), part) for part in groups])

    def head_blocks(self, z: Tensor) -> Iterator[tuple[int, Tensor]]:
        """``(start, logits (N, block))`` of the residual ``z (…, C)``, block by block of the vocabulary.

        Final norm, head, and what the family does to logits (a soft cap, a scale). A block stays valid.

        Raises:
            ConfigError: a family whose layers are not known.
            DataError, BudgetExceeded: as for :meth:`hidden`.
        """
        yield from self.reduced_head(z, lambda start, logits: (start, logits))

    def reduced_head(self, z: Tensor, work: Callable[[int, Tensor], Result]) -> Iterator[Result]:
        """``work(start, logits (N, block))`` for each block of :meth:`head_blocks`; the results in order.

        Several blocks are worked on at once, each on a thread of its own with one thread of torch, so
        ``work`` must not write to what others read; the logits go when it returns.

        Raises:
            ConfigError, DataError, BudgetExceeded: as for :meth:`head_blocks`; and what ``work`` raises.
        """
        layout = known_layout(self.family, self._layout)
        with torch.no_grad():
            states = getattr(self._built.base, layout.norm)(self._float(z)).reshape(-1, self.width)
        yield from self._logits(states, work)

    def walk(self, ids: Tensor, sites: Collection[str] | None = None) -> Iterator[Point]:
        """One streamed pass over ids ``(B, T)``: the residual stream that enters each site, in order.

        ``sites`` may name some, q and k norms among them (their point is that of their attention), and the
        pass ends at the last of them; without it every branch is a point, norms not. The residual that leaves
        the last layer is the point of the site ``"head"``, which comes last (:meth:`head_blocks` takes it).
        ``z`` is not altered afterwards.

        Raises:
            ConfigError: no such site, or a family whose layers are not known.
            DataError, BudgetExceeded: as for :meth:`hidden`.
        """
        layout = known_layout(self.family, self._layout)
        wanted = None if sites is None else set(sites)
        for site in wanted or ():
            if site != "head":
                self._parse(site)
        ids = self._checked(ids)
        with torch.no_grad():
            z = getattr(self._built.base, layout.embedding)(ids)
            if layout.learned is not None:
                positions = torch.arange(ids.shape[1], device=z.device)[None]
                z = z + getattr(self._built.base, layout.learned)(positions)
        for here in self.branches():
            for site in (here, f"{here}.q_norm", f"{here}.k_norm"):
                if site == here if wanted is None else site in wanted:
                    yield Point(site, z)
                    if wanted is not None:
                        wanted.discard(site)
                        if not wanted:
                            return
            z = z + self.branch(here, z).update
        yield Point("head", z)

    def branches(self) -> list[str]:
        """The sites that add to the residual stream, in the order in which they do; norms are none.

        Raises:
            ConfigError: a family whose layers are not known.
        """
        parts = known_layout(self.family, self._layout).branches
        return [
            f"layers.{number}.{part}"
            for number in range(self.layers)
            for part in parts
            if self._find(number, part) is not None
        ]

    def module(self, site: str) -> tuple[nn.Module, dict[str, tuple[str, ...]]]:
        """The library's module of a site, and the tensors of :attr:`files` behind each of its parameters.

        Parameters go by their names within the module; the tensors are the model's own, whatever is remapped.
        Of a streamed matrix the module has no values.

        Raises:
            ConfigError: no such site, or a family whose layers are not known.
        """
        number, part = self._parse(site)
        branch, _, norm = part.partition(".")
        layers = known_layout(self.family, self._layout).layers
        parts = (self._built.prefix, layers, str(number), self._names(branch).module, norm)
        start = ".".join(filter(None, parts)) + "."
        names = {
            key.removeprefix(start): source.names
            for key, source in self._home.items()
            if key.startswith(start)
        }
        return cast(nn.Module, self._find(number, part)), names

    def onward(self, z: Tensor, after: str, to: str = "head") -> Tensor:
        """The residual ``z (B, T, C)`` that leaves ``after``, carried to where it enters ``to``.

        Every branch between the two is added in order; with ``to="head"`` the result goes to
        :meth:`head_blocks` and :meth:`nll_at`. At the residual of a forward pass of the same texts this is,
        bit for bit, that pass.

        Raises:
            ConfigError: a site that is no branch of this model, or ``to`` that does not come behind
                ``after``.
            DataError, BudgetExceeded: as for :meth:`hidden`.
        """
        order = [*self.branches(), "head"]
        for site in (after, to):
            if site not in order:
                raise ConfigError(f"'{site}' adds nothing to the residual stream: name a branch of a layer")
        first, last = order.index(after) + 1, order.index(to)
        if first > last:
            raise ConfigError(f"{to} does not come behind {after}")
        for site in order[first:last]:
            z = z + self.branch(site, z).update
        return z

    @torch.no_grad()
    def nll_at(self, z: Tensor, ids: Tensor) -> Tensor:
        """The residual ``z (B, T, C)`` that enters the head and its ids ``(B, T)`` to nats ``(B, T − 1)``.

        Raises:
            ConfigError: a family whose layers are not known.
            DataError, BudgetExceeded: as for :meth:`nll`.
        """
        ids = self._checked(ids)
        layout = known_layout(self.family, self._layout)
        return self._losses(getattr(self._built.base, layout.norm)(self._float(z)), ids)

    @torch.no_grad()
    def branch(
        self, site: str, z: Tensor, probabilities: bool = False, added: Tensor | None = None
    ) -> Branch:
        """A site as a function: residual ``z (B, T, C)`` to what it adds ``(B, T, C)``.

        Pre-norm, module, and post-norm where the family has one; positions 0 … T − 1, causal, with the
        window and angles of that site's own kind of layer. At the residual that entered the site in a forward
        pass of the same texts this is, bit for bit, what the pass added. A q or k norm is applied to what
        :meth:`norm_input` returns. With ``probabilities`` attention runs eagerly and ``(B, H, T, T)`` comes
        along; the update then differs in the last bits. ``added (B, T, C)`` joins what the module gives,
        before the post-norm; zeros change no bit.

        Raises:
            ConfigError: no such site, probabilities of one that is no attention, or something added to a
                norm.
            DataError, BudgetExceeded: as for :meth:`hidden`.
        """
        number, part = self._parse(site)
        if probabilities and part != "self_attn":
            raise ConfigError(f"{site} has no attention probabilities: ask for those of a .self_attn")
        z = self._float(z)
        if part.endswith("_norm"):
            if added is not None:
                raise ConfigError(f"{site} is a gain: nothing is added to what it gives")
            return Branch(cast(nn.Module, self._find(number, part))(z))
        names, layer = self._names(part), self._layer(number)
        groups = self._together(z)
        more = [None] * len(groups) if added is None else self._together(self._float(added))
        with self._reading(site, len(groups), self._matrices(number, names.module)):
            done = [
                self._add(number, part, names, layer, part_of_z, probabilities, part_of_added)
                for part_of_z, part_of_added in zip(groups, more, strict=True)
            ]
        weights = [branch.probabilities for branch in done if branch.probabilities is not None]
        return Branch(torch.cat([branch.update for branch in done]), torch.cat(weights) if weights else None)

    @torch.no_grad()
    def module_input(self, site: str, z: Tensor) -> Tensor:
        """What the module of a branch receives when ``z (B, T, C)`` enters the branch: z after the pre-norm.

        Raises:
            ConfigError: the site is no branch of this model.
        """
        number, part = self._parse(site)
        if part.endswith("_norm"):
            raise ConfigError(f"{site} is no branch: norm_input gives what it receives")
        return getattr(self._layer(number), self._names(part).before)(self._float(z))

    @torch.no_grad()
    def norm_input(self, site: str, z: Tensor) -> Tensor:
        """What a q or k norm receives when the residual ``z (B, T, C)`` enters its layer.

        The shape is the family's: heads of ``D`` values in the last dimension, ``(B, T, H, D)`` or
        ``(B, H, T, D)``.

        Raises:
            ConfigError: the site is no q or k norm.
            DataError, BudgetExceeded: as for :meth:`hidden`.
        """
        number, part = self._parse(site)
        if not part.endswith("_norm"):
            raise ConfigError(f"{site} is no q or k norm: its input is the residual stream")
        norm = cast(nn.Module, self._find(number, part))
        names, layer = self._names("self_attn"), self._layer(number)
        hook = norm.register_forward_pre_hook(_capture)
        try:
            found = [self._captured(number, names, layer, part) for part in self._together(self._float(z))]
        finally:
            hook.remove()
        return _joined(found)

    def remap(self, mapping: Mapping[str, str], with_norm: bool = True) -> None:
        """Let each site on the left use the tensors of the site on the right, from here on.

        The mapping takes the place of any earlier one: ``remap({})`` restores the model. Sources are always
        the model's own tensors, so two sites can be exchanged. ``with_norm`` moves the norms of a branch with
        its module. A site keeps the window and angles of its own layer.

        Raises:
            ConfigError: no such site, or two sites whose tensors differ in kind or shape.
            DataError: as for :meth:`hidden`.
        """
        moved: dict[str, str] = {}
        for target, source in mapping.items():
            moved |= self._moved(target, source, with_norm)
        before = self._built.reader.sources
        after = self._home | {target: self._home[source] for target, source in moved.items()}
        changed = {key for key in after if after[key] != before[key]}
        before.update(after)
        self._remapped, self._with_norm = dict(mapping), with_norm
        load_resident(self._built, [key for key in resident_keys(self._built) if key in changed])

    @contextmanager
    def remapped(self, mapping: Mapping[str, str], with_norm: bool = True) -> Iterator[None]:
        """:meth:`remap` for the length of a ``with`` block; the mapping before it returns afterwards."""
        earlier = self._remapped, self._with_norm
        self.remap(mapping, with_norm)
        try:
            yield
        finally:
            self.remap(*earlier)

    def own_tensors(self, site: str, with_norm: bool = True) -> list[str]:
        """The tensors of :attr:`files` that :meth:`remap` of this site leaves unused, by name, sorted.

        Raises:
            ConfigError: no such site, or a family whose layers are not known.
        """
        sources = [self._home[key] for key in self._moved(site, site, with_norm)]
        experts = [expert for source in sources for expert in source.experts]
        return sorted({name for source in (*sources, *experts) for name in source.names})

    def plan_mib(self, texts: int, tokens: int, held_mib: float | None = None) -> float:
        """The planned peak of this process in MiB for a pass over ``texts`` texts of ``tokens`` tokens.

        ``held_mib`` is what a process holds when it opens the model, for a plan of another process.
        """
        together = min(texts, self._sizes().together(tokens, self.budget_mib) or texts)
        # Two residual streams, ids and updates of all texts stay while groups of them go through.
        kept = 4 * 3 * texts * tokens * self.width / MIB
        held = self._opened_mib if held_mib is None else held_mib
        return held + first_pass_mib() + self._sizes().mib(together, tokens) + kept

    def _sizes(self) -> PassSizes:
        """What one pass holds, from the shapes of the matrices and of the heads."""
        shapes = [self._built.shapes[key] for key in self._built.matrices]
        widest = max(max(shape) for shape in shapes)
        delta = DELTA_BYTES / MIB if self._layout is not None and self.sites("linear_attention") else 0.0
        heads = int(self.config.num_attention_heads) if self.config._attn_implementation == "eager" else 0
        return PassSizes(
            fixed_mib=self._built.reader.buffers_mib + delta,
            per_token=4 * self.width + 4 * widest,
            squared=3 * heads,
        )

    def _together(self, texts: Tensor) -> list[Tensor]:
        """``texts (B, T, …)`` in as few parts of equal size as the budget has room for."""
        most = self._sizes().together(texts.shape[1], self.budget_mib)
        return [texts] if most is None else list(texts.tensor_split(-(-len(texts) // most)))

    @contextmanager
    def _reading(self, label: str, groups: int, order: list[str]) -> Iterator[None]:
        """A pass of ``groups`` groups of texts; what a team does not do runs on this thread alone.

        The other threads of torch would otherwise wait for more work in a loop, on the cores of the team.
        """
        with self._built.reader.reading(f"{label} {groups}", order * groups):
            threads = torch.get_num_threads()
            if self._built.reader.team.size == 1:
                yield
                return
            torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def _states(self, ids: Tensor) -> Tensor:
        return self._built.base(input_ids=ids, use_cache=False).last_hidden_state

    def _losses(self, states: Tensor, ids: Tensor) -> Tensor:
        """Final states ``(B, T, C)`` and ids ``(B, T)`` to nats ``(B, T − 1)``."""
        states = states[:, :-1].reshape(-1, self.width)
        targets = ids[:, 1:].reshape(-1)

        def reduce(start: int, logits: Tensor) -> tuple[Tensor, Tensor]:
            inside = (targets >= start) & (targets < start + logits.shape[1])
            places = (targets - start).clamp(0, logits.shape[1] - 1)
            chosen = logits.gather(1, places[:, None])[:, 0].where(inside, 0.0)
            return torch.logsumexp(logits, dim=-1), chosen

        total = states.new_full((len(targets),), -torch.inf, dtype=torch.float64)
        picked = states.new_zeros(len(targets), dtype=torch.float64)
        for part, chosen in self._logits(states, reduce):
            total = torch.logaddexp(total, part.double())
            picked += chosen
        return (total - picked).float().view(ids.shape[0], -1)

    def _logits(self, states: Tensor, work: Callable[[int, Tensor], Result]) -> Iterator[Result]:
        """``work(start, logits (N, block))`` of final states ``(N, C)``, block by block; results in order.

        The logits are those of the library's own forward around a base model that returns the states.
        """
        built = self._built
        ids = states.new_zeros((1, 1), dtype=torch.long)

        def block_of(start: int, _: int, rows: Tensor) -> Result:
            built.states.given.states, built.block.given.block = states[None], rows
            try:
                return work(start, built.head(input_ids=ids).logits[0])
            finally:
                del built.states.given.states, built.block.given.block

        with built.reader.reading("head", [built.head_key]):
            blocks = built.reader.each(built.head_key, block_of)
            while True:
                with torch.no_grad():
                    result = next(blocks, None)
                if result is None:
                    return
                yield result

    def _captured(self, number: int, names: BranchNames, layer: nn.Module, z: Tensor) -> Tensor:
        """Run an attention until a norm in it, which is hooked, gives away its input."""
        try:
            with self._reading(f"layers.{number} norms", 1, self._matrices(number, names.module)):
                self._add(number, "self_attn", names, layer, z, False)
        except _Captured as captured:
            return captured.value
        raise ConfigError(f"layers.{number}.self_attn does not use its norms")

    def _add(
        self,
        number: int,
        part: str,
        names: BranchNames,
        layer: nn.Module,
        z: Tensor,
        probabilities: bool,
        added: Tensor | None = None,
    ) -> Branch:
        """A branch at the residual ``z (B, T, C)``: pre-norm, module, post-norm where there is one."""
        h = getattr(layer, names.before)(z)
        module = getattr(layer, names.module)
        weights = None
        if part == "mlp":
            update = module(h)
            update = update[0] if isinstance(update, tuple) else update
        elif part == "linear_attn":
            update = module(hidden_states=h, cache=None, attention_mask=None)
        elif probabilities:
            with _eagerly(module) as config:
                update, weights = module(hidden_states=h, **self._places(number, h, config))
        else:
            update, _ = module(hidden_states=h, **self._places(number, h, self.config))
        if added is not None:
            update = update + added
        if names.after is not None:
            update = getattr(layer, names.after)(update)
        return Branch(update, weights)

    def _places(self, number: int, h: Tensor, config: Any) -> dict[str, Any]:
        """Mask and rotary angles of a layer for T positions, from the length alone."""
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        kinds = getattr(config, "layer_types", None)
        if kinds is not None:
            kind = kinds[number]
        else:
            windowed = getattr(config, "sliding_window", None) is not None
            kind = "sliding_attention" if windowed else "full_attention"
        make = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
        positions = torch.arange(h.shape[1], device=h.device)[None]
        mask = make(config=config, inputs_embeds=h, attention_mask=None, cache=None, position_ids=positions)
        places: dict[str, Any] = {"attention_mask": mask, "cache": None}
        rotary = getattr(self._built.base, "rotary_emb", None)
        if rotary is not None:
            by_kind = self._layout is not None and self._layout.angles_by_kind
            places["position_embeddings"] = rotary(h, positions, *((kind,) if by_kind else ()))
        return places

    def _moved(self, target: str, source: str, with_norm: bool) -> dict[str, str]:
        """Key -> key of every parameter that a remapping of one site moves."""
        (to, part), (of, other) = self._parse(target), self._parse(source)
        if part != other and not {part, other} <= _EXCHANGEABLE:
            raise ConfigError(f"{target} cannot use the tensors of {source}: they are of two kinds")
        names = [(part, other)]
        if part in known_layout(self.family, self._layout).branches:
            branch = self._names(part)
            norms = [branch.before, branch.after] if with_norm else []
            names = [(name, name) for name in (branch.module, *norms) if name is not None]
        layers = f"{self._built.prefix}.{known_layout(self.family, self._layout).layers}"
        moved: dict[str, str] = {}
        for name, of_name in names:
            starts = f"{layers}.{to}.{name}.", f"{layers}.{of}.{of_name}."
            ends = [
                {key[len(start) :]: key for key in self._home if key.startswith(start)} for start in starts
            ]
            shapes = [{end: self._built.shapes[key] for end, key in keys.items()} for keys in ends]
            if shapes[0] != shapes[1]:
                raise ConfigError(f"{target} cannot use the tensors of {source}: their shapes differ")
            moved |= {key: ends[1][end] for end, key in ends[0].items()}
        return moved

    def _parse(self, site: str) -> tuple[int, str]:
        """``layers.N.part`` to (N, part), if this model has it."""
        known_layout(self.family, self._layout)
        match = re.fullmatch(r"layers\.(\d{1,6})\.(.+)", site)
        if match and int(match[1]) < self.layers and match[2] in KINDS.values():
            number, part = int(match[1]), match[2]
            if self._find(number, part) is not None:
                return number, part
        raise ConfigError(
            f"this model has no site '{site}': it has layers.0 … layers.{self.layers - 1} with "
            f"{', '.join(part for kind, part in KINDS.items() if self.sites(kind))}"
        )

    def _matrices(self, number: int | None = None, module: str = "") -> list[str]:
        """The keys of the streamed matrices of the base model, or of a module of one layer, in order."""
        start = f"{self._built.prefix}."
        if number is not None:
            layers = known_layout(self.family, self._layout).layers
            start = f"{start}{layers}.{number}.{module}."
        return [key for key in self._built.matrices if key.startswith(start)]

    def _find(self, number: int, part: str) -> nn.Module | None:
        """The module of a site, or None where the layer has none."""
        branch, _, norm = part.partition(".")
        layout = known_layout(self.family, self._layout)
        module = None
        if branch in layout.branches:
            module = getattr(self._layer(number), layout.branches[branch].module, None)
        return module if not norm or module is None else getattr(module, norm, None)

    def _names(self, part: str) -> BranchNames:
        return known_layout(self.family, self._layout).branches[part]

    def _layer(self, number: int) -> nn.Module:
        return getattr(self._built.base, known_layout(self.family, self._layout).layers)[number]

    def _float(self, z: Tensor) -> Tensor:
        return z.to(self._built.reader.device, torch.float32)

    def _checked(self, ids: Tensor) -> Tensor:
        """Ids ``(B, T)`` on the model's device, or a refusal."""
        if ids.dim() != 2 or ids.is_floating_point() or ids.numel() == 0:
            raise DataError(
                f"texts are whole numbers of the shape (B, T), not {ids.dtype} {tuple(ids.shape)}"
            )
        most = getattr(self.config, "max_position_embeddings", None)
        if most is not None and ids.shape[1] > most:
            raise DataError(
                f"a text of {ids.shape[1]} tokens does not fit this model, which reads 1 to {most}: "
                "change the length"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab:
            raise DataError(
                f"a token id lies outside 0 … {self.vocab - 1}, the vocabulary of this model: "
                "use the tokenizer it was trained with"
            )
        return ids.to(self._built.reader.device, torch.long)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Captured(Exception):
    """Carries the input of a norm out of the forward pass of its module."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def _capture(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    raise _Captured(inputs[0].clone())


@contextmanager
def _eagerly(module: nn.Module) -> Iterator[Any]:
    """The module with a configuration of its own by which it computes attention probabilities."""
    import copy

    shared: Any = module.config
    own = copy.copy(shared)
    own._attn_implementation = "eager"
    module.config = own
    try:
        yield own
    finally:
        module.config = shared


def open_streamed(
    folder: Path | str, budget_mib: float | None = 512, device: torch.device | str = "cpu"
) -> StreamedLM:
    """Open a Hugging Face folder (``config.json`` and safetensors) without loading its matrices.

    ``budget_mib`` is a soft limit on the resident memory of the process, looked at before every matrix; what
    the process held beyond it when a pass began is not counted against it. None is no limit. Nothing is
    downloaded, no code from the folder is run and no pickle is opened. Sets ``HF_HUB_OFFLINE`` and
    ``USE_HUB_KERNELS`` for this process.

    Raises:
        DataError: a damaged, incomplete or hostile file, a configuration that does not fit the tensors.
        ConfigError: a family that the installed library or this package cannot run.
    """
    folder = Path(folder).expanduser().absolute()
    config = read_config(folder)
    files = open_tensors(folder)
    try:
        built = build(folder, files, config, torch.device(device), PassLimit(budget_mib))
        return StreamedLM(folder, built, budget_mib)
    except BaseException:
        files.close()
        raise
