"""Measured tables: reads them from files of several formats, and finds missing parts of a model.

The columns of a file identify its format:

    windtunnel profile  operator, component, calls, latency_us, ...: see `hwmodels.levels.profile`
    Vidur               num_tokens with attn_pre_proj_us, mlp_up_proj_us, ...; or, as Vidur writes its
                        mlp.csv, time_stats.attn_pre_proj.median, ... in milliseconds
    LLMServingSim       a folder with three files whose names end in dense, attention and per_sequence, and
    with experts a fourth one, moe
    a recorded run      iterations.parquet, as `windtunnel simulate` writes it

Files are .parquet, .csv or .csv.gz. If columns gpu, model and tp distinguish several set-ups, the rows of the
simulated one are selected. Only this module and `table_files` need pandas, which reads both formats; other
modules get numpy columns.

LLMServingSim (Cho et al., IISWC 2024; profiles of its version 2, vLLM 0.19): one transformer layer inside
vLLM, prompt chunks and decodes in one attention call. Vidur (Agrawal et al., MLSys 2024): linear and
element-wise operators; its attention is not part of the stored copy.

A table may contain complete expert layers (any operator with `expert` or `moe` in its name); otherwise the
roofline prices the experts, their router and the shared experts. Models that a table cannot describe (several
kinds of attention, linear attention) and tables of other layers are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from hwmodels.iterations.ops import Operator
from hwmodels.levels.profile import Profile, Rows, check_columns
from hwmodels.levels.table_files import read_table_file
from hwmodels.model import DenseMlp, MixtureOfExperts, ModelSpec
from hwmodels.model.attention import LatentAttention
from hwmodels.model.recurrent import BesideAttention, RecurrentLayer
from hwmodels.operators.moe_routing import ExpertLayer, Routing, rank_loads

ONCE = {"embedding", "final_layernorm", "lm_head", "sampler"}
TWICE_A_LAYER = {"layernorm", "add"}
GEMMS = {"qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj", "experts"}
DENSE_MLP = {"gate_up_proj", "up_proj", "down_proj", "act_fn"}
"""Operators of a dense MLP, which expert layers do not run."""

VIDUR_OPERATORS = {
    "emb_us": "embedding",
    "input_layernorm_us": "input_layernorm",
    "attn_pre_proj_us": "qkv_proj",
    "attn_rope_us": "rotary_emb",
    "attn_post_proj_us": "o_proj",
    "post_attention_layernorm_us": "post_attention_layernorm",
    "mlp_up_proj_us": "gate_up_proj",
    "mlp_act_us": "act_fn",
    "mlp_down_proj_us": "down_proj",
    "add_us": "add",
}


class Layers(NamedTuple):
    """Numbers of layers by kind, and the number of experts that a batch activates."""

    all: int
    dense_mlps: int
    """Layers that run the operators of a dense MLP."""
    experts: int = 0
    active_experts: Callable[[Any], Any] | None = None
    """Returns the expected number of routed experts that receive tokens, by the number of tokens."""


def llmservingsim_rows(
    *, dense: Rows, attention: Rows, per_sequence: Rows, layers: Layers, moe: Rows | None = None
) -> Rows:
    """Returns rows of `Profile` from LLMServingSim's layer tables, for one GPU, model and tp.

    A layer runs each operator once, its norm twice. Times cover only kernels, without all-reduces. Experts
    are measured by the numbers of tokens and of active experts; the expected number of active experts is
    used.
    """
    check_columns("dense", dense, ("layer", "tokens", "time_us"))
    check_columns("attention", attention, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"))
    check_columns("per_sequence", per_sequence, ("layer", "sequences", "time_us"))
    for table, rows in (("dense", dense), ("attention", attention), ("per_sequence", per_sequence)):
        _check_one_setup(table, rows, ("gpu", "model", "tp"))
    experts = [] if moe is None else [_expert_rows(moe, layers)]
    return _stacked(
        [
            _named_rows(dense["layer"], dense["time_us"], layers, num_tokens=dense["tokens"]),
            *experts,
            _named_rows(
                per_sequence["layer"], per_sequence["time_us"], layers, num_seqs=per_sequence["sequences"]
            ),
            _named_rows(
                np.full(len(attention["time_us"]), "attention"),
                attention["time_us"],
                layers,
                prefill_tokens=attention["prefill_chunk"],
                cached_tokens=attention["kv_prefill"],
                decode_seqs=attention["n_decode"],
                decode_kv_tokens=attention["kv_decode"],
            ),
        ]
    )


def vidur_columns(rows: Rows) -> Rows:
    """Returns Vidur's columns in microseconds: from medians in milliseconds, or unchanged."""
    renamed = {}
    for name, values in rows.items():
        median = re.fullmatch(r"time_stats\.(\w+)\.median", name)
        renamed[f"{median[1]}_us" if median else name] = 1e3 * values if median else values
    return renamed


def vidur_rows(linear_ops: Rows, *, layers: Layers) -> Rows:
    """Returns rows of `Profile` from Vidur's linear operators, for one GPU, model and tp.

    Each operator runs once per layer, the residual add twice. Attention, LM head and all-reduces are missing.
    Operators that a model does not have are NaN (phi-2 has one norm per layer).
    """
    present = [name for name in VIDUR_OPERATORS if name in linear_ops]
    check_columns("linear_ops", linear_ops, ("num_tokens", *(present or VIDUR_OPERATORS)))
    _check_one_setup("linear_ops", linear_ops, ("gpu", "model", "tp"))
    parts = []
    for column in present:
        latency = np.asarray(linear_ops[column], dtype=np.float64)
        measured = ~np.isnan(latency)
        names = np.full(int(measured.sum()), VIDUR_OPERATORS[column])
        num_tokens = np.asarray(linear_ops["num_tokens"])[measured]
        parts.append(_named_rows(names, latency[measured], layers, num_tokens=num_tokens))
    return _stacked(parts)


def _expert_rows(moe: Rows, layers: Layers) -> dict[str, Any]:
    """Returns a row per number of tokens, interpolated to the expected number of active experts."""
    check_columns("moe", moe, ("tokens", "activated_experts", "time_us"))
    _check_one_setup("moe", moe, ("gpu", "model", "tp", "ep"))
    if layers.active_experts is None:
        raise ValueError("moe: the simulated model has no experts; name the table of this model")
    sizes = np.unique(np.asarray(moe["tokens"], dtype=np.float64))
    times = []
    for tokens, active in zip(sizes, np.asarray(layers.active_experts(sizes)), strict=True):
        own = np.flatnonzero(np.asarray(moe["tokens"]) == tokens)
        own = own[np.argsort(np.asarray(moe["activated_experts"])[own])]
        reached, time_us = (np.asarray(moe[name])[own] for name in ("activated_experts", "time_us"))
        times.append(np.interp(active, reached, time_us))
    return _named_rows(np.full(len(sizes), "experts"), np.array(times), layers, num_tokens=sizes)


def _named_rows(names: Any, latency_us: Any, layers: Layers, **sizes: Any) -> dict[str, Any]:
    operators = np.asarray(names).astype(str)
    return {
        "operator": operators,
        "component": np.array([_component(name) for name in operators.tolist()]),
        "calls": np.array([_calls(name, layers) for name in operators.tolist()]),
        "latency_us": np.asarray(latency_us, dtype=np.float64),
        **{name: np.asarray(size, dtype=np.float64) for name, size in sizes.items()},
    }


def _component(operator: str) -> str:
    if operator in ("lm_head", "sampler"):
        return "lm_head"
    if operator == "attention":
        return "attention"
    return "gemm" if operator in GEMMS else "elementwise"


def _calls(operator: str, layers: Layers) -> int:
    if operator in ONCE:
        return 1
    if operator == "experts":
        return layers.experts
    if operator in DENSE_MLP:
        return layers.dense_mlps
    return 2 * layers.all if operator in TWICE_A_LAYER else layers.all


def _stacked(parts: list[dict[str, Any]]) -> Rows:
    """Concatenates the parts; sizes that a part lacks are 0."""
    names = dict.fromkeys(name for part in parts for name in part)
    zeros = [np.zeros(len(part["operator"])) for part in parts]
    return {
        name: np.concatenate([part.get(name, zero) for part, zero in zip(parts, zeros, strict=True)])
        for name in names
    }


def _check_one_setup(table: str, rows: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name in rows and len(values := sorted({str(value) for value in rows[name]})) > 1:
            raise ValueError(f"{table}: {name} is {', '.join(values)}; select the rows of one")


SHARED = {"shared_gate_up_proj", "shared_up_proj", "shared_down_proj"}
OTHERS = "choose latency=calibrated, or the table of this model"


def layers_of(model: ModelSpec, routing: Routing) -> Layers:
    """Returns the numbers of layers of a model; routing: distribution of tokens over experts."""
    routed = [block.mlp for block in model.blocks if isinstance(block.mlp, MixtureOfExperts)]
    if not routed:
        return Layers(model.num_layers, model.num_layers)
    layer = ExpertLayer(
        hidden_size=routed[0].expert_hidden_size(model.hidden_size),
        intermediate_size=routed[0].intermediate_size,
        top_k=routed[0].top_k,
        num_experts=routed[0].num_experts,
    )
    return Layers(
        all=model.num_layers,
        dense_mlps=num_dense_mlps(model) or model.num_layers,
        experts=sum(block.count for block in model.blocks if isinstance(block.mlp, MixtureOfExperts)),
        active_experts=lambda tokens: rank_loads(tokens, layer, routing).active_experts,
    )


def num_dense_mlps(model: ModelSpec) -> int:
    """Returns the layers with a dense MLP or, without any, the layers with shared experts."""
    dense = sum(block.count for block in model.blocks if isinstance(block.mlp, DenseMlp))
    shared = sum(
        block.count
        for block in model.blocks
        if isinstance(block.mlp, MixtureOfExperts) and block.mlp.shared_intermediate_size
    )
    return dense or shared


def lacking(profile: Profile, operators: Iterable[Operator], model: ModelSpec) -> tuple[Operator, ...]:
    """Returns the operators of expert layers that the table lacks; operators: the model's operators."""
    names = [operator.name.lower() for operator in profile.operators]
    if not model.has_experts or any(re.search(r"(?<!shared_)expert|moe", name) for name in names):
        return ()
    some_dense = any(isinstance(block.mlp, DenseMlp) for block in model.blocks)
    shared = any("shared" in name for name in names) or (not some_dense and bool(DENSE_MLP & {*names}))
    router = any(name == "gate" or "router" in name for name in names)
    wanted = {"experts"} | (set() if router else {"router"}) | (set() if shared else SHARED)
    return tuple(operator for operator in operators if operator.name in wanted)


def check_covers(profile: Profile, model: ModelSpec) -> None:
    """Raises ValueError if the rows cannot belong to the model's layers."""
    calls = {operator.name: operator.calls for operator in profile.operators}
    kinds = {block.attention for block in model.blocks}
    if any(isinstance(kind, RecurrentLayer | BesideAttention) for kind in kinds):
        raise ValueError(
            f"{model.name} has linear attention, which tables do not describe; choose latency=calibrated"
        )
    if len(kinds) > 1 and profile.attention is not None:
        raise ValueError(
            f"{model.name} has {len(kinds)} kinds of attention, tables have one; choose latency=calibrated"
        )
    if "qkv_proj" in calls and any(isinstance(kind, LatentAttention) for kind in kinds):
        raise ValueError(f"qkv_proj: {model.name} has latent attention without such a matrix; {OTHERS}")
    most = num_dense_mlps(model)
    for name in sorted(DENSE_MLP) if model.has_experts else ():
        if calls.get(name, 0) > most:
            layers = f"a dense MLP in {most} layers only" if most else "experts in place of a dense MLP"
            raise ValueError(f"{name}: calls={calls[name]}: {model.name} has {layers}; {OTHERS}")


SUFFIXES = (".parquet", ".csv.gz", ".csv")
LAYER_TABLES = ("dense", "attention", "per_sequence")
EXPERTS_TABLE = "moe"
"""The fourth table, for models with experts."""
OWN_COLUMNS = {"operator", "component", "latency_us"}
TP_COLUMNS = ("tp", "num_tensor_parallel_workers")


class Setup(NamedTuple):
    """The simulated set-up, which selects the rows of a table."""

    gpu: str | None
    """Name of the GPU in the table, if the user set it."""
    model: str | None
    device_name: str
    model_name: str
    tensor_parallel_size: int
    model_spec: ModelSpec
    routing: Routing

    @property
    def layers(self) -> Layers:
        """Numbers of layers by kind."""
        return layers_of(self.model_spec, self.routing)


class Table(NamedTuple):
    """A table that was read from a file or folder."""

    source: str
    """Source of the measurements, and their GPU."""
    rows: Rows
    profile: Profile


@lru_cache(maxsize=8)
def read_table(path: Path, setup: Setup) -> Table:
    """Returns the table. Raises ValueError naming the file and its error."""
    try:
        layers = _layer_tables(path) if path.is_dir() else {}
        source, rows = _layer_rows(layers, setup) if layers else _file_rows(_profile_file(path), setup)
        return Table(source, rows, Profile.from_rows(rows))
    except ValueError as error:
        raise ValueError(f"latency.path={path}: {error}") from None


def _layer_rows(layers: Mapping[str, Path], setup: Setup) -> tuple[str, Rows]:
    if not setup.model_spec.has_experts:
        layers = {name: file for name, file in layers.items() if name != EXPERTS_TABLE}
    chosen = {name: _selected(_frame_in_folder(file), setup) for name, file in layers.items()}
    if EXPERTS_TABLE in chosen and "ep" in chosen[EXPERTS_TABLE]:
        chosen[EXPERTS_TABLE] = chosen[EXPERTS_TABLE].query("ep == 1")
    tables = {name: columns_of(frame) for name, frame in chosen.items()}
    rows = llmservingsim_rows(**tables, layers=setup.layers)
    return f"LLMServingSim's tables{_on_gpu(chosen['dense'])}", rows


def _file_rows(file: Path, setup: Setup) -> tuple[str, Rows]:
    frame = read_frame(file)
    kind = _kind(frame)
    if kind is None:
        raise ValueError(_unknown(frame))
    chosen = _selected(frame, setup)
    rows = columns_of(chosen)
    if kind == "Vidur's profile":
        rows = vidur_rows(vidur_columns(rows), layers=setup.layers)
    return f"{kind}{_on_gpu(chosen)}", rows


def _on_gpu(chosen: pd.DataFrame) -> str:
    return f" of {chosen['gpu'].iloc[0]}" if "gpu" in chosen else ""


def _profile_file(path: Path) -> Path:
    """Returns the file itself, or the one profile in a folder."""
    if not path.is_dir():
        return path
    tables = [file for file in sorted(path.iterdir()) if _stem(file) is not None]
    known = [file for file in tables if _kind(_frame_in_folder(file)) is not None]
    if len(known) != 1:
        raise ValueError(
            f"holds {len(known)} profiles; name one file, or a folder with LLMServingSim's "
            f"{', '.join(LAYER_TABLES)}"
        )
    return known[0]


def _layer_tables(folder: Path) -> dict[str, Path]:
    """Returns LLMServingSim's three files, and the experts' file if it exists; {} if one is missing."""
    found = {}
    for file in sorted(folder.iterdir()):
        stem = _stem(file)
        for name in (*LAYER_TABLES, EXPERTS_TABLE):
            if stem == name or (stem or "").endswith(f"_{name}"):
                found[name] = file
    return found if {*LAYER_TABLES} <= {*found} else {}


def _stem(file: Path) -> str | None:
    """Returns the name without its suffix; None if the file is not a table."""
    for suffix in SUFFIXES:
        if file.name.endswith(suffix):
            return file.name.removesuffix(suffix)
    return None


@lru_cache(maxsize=8)
def read_frame(file: Path) -> pd.DataFrame:
    """Returns the table in a file. Raises ValueError if it is not a table."""
    if _stem(file) is None:
        raise ValueError(f"must be a table: {', '.join(SUFFIXES)}")
    try:
        return read_table_file(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read: {error}") from error


def _frame_in_folder(file: Path) -> pd.DataFrame:
    """Calls `read_frame`; the ValueError also names the file, because the user named only the folder."""
    try:
        return read_frame(file)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def _kind(frame: pd.DataFrame) -> str | None:
    """Returns the format of a table by its columns; None if it is unknown."""
    if set(frame) >= OWN_COLUMNS:
        return "windtunnel's profile"
    return "Vidur's profile" if set(vidur_columns(columns_of(frame))) & set(VIDUR_OPERATORS) else None


def _unknown(frame: pd.DataFrame) -> str:
    return (
        f"unknown format: columns {', '.join(map(str, frame))}; known are our own (operator, component, "
        "calls, latency_us, ...), Vidur's (num_tokens, attn_pre_proj_us, ...) and, as a folder, "
        f"LLMServingSim's {', '.join(LAYER_TABLES)}"
    )


def columns_of(frame: pd.DataFrame) -> Rows:
    """Returns the columns of a table as arrays, by name."""
    return {str(name): frame[name].to_numpy() for name in frame}


def _selected(frame: pd.DataFrame, setup: Setup) -> pd.DataFrame:
    """Returns the rows of the set-up. Raises ValueError if they are ambiguous."""
    frame = _named(frame, "gpu", setup.gpu, setup.device_name)
    frame = _named(frame, "model", setup.model, setup.model_name)
    if setup.tensor_parallel_size > 1 and not {*TP_COLUMNS} & {*frame}:
        raise ValueError(
            f"tensor_parallel_size={setup.tensor_parallel_size}: the table has no column tp, so its rows are "
            "those of a whole model; add the column, or choose latency=calibrated"
        )
    for column in TP_COLUMNS:
        if column in frame:
            sizes = sorted(frame[column].unique())
            frame = frame[frame[column] == setup.tensor_parallel_size]
            if frame.empty:
                raise ValueError(
                    f"tensor_parallel_size={setup.tensor_parallel_size}: must be one of "
                    f"{', '.join(map(str, sizes))}, which the table has"
                )
    return frame


def _named(frame: pd.DataFrame, column: str, name: str | None, simulated: str) -> pd.DataFrame:
    if column not in frame:
        return frame
    names = sorted(str(value) for value in frame[column].unique())
    if name is not None:
        if name not in names:
            raise ValueError(f"{column}={name}: must be one of {', '.join(names)}, which the table has")
        return frame[frame[column] == name]
    matches = [one for one in names if _plain(one) in _plain(simulated) or _plain(simulated) in _plain(one)]
    if len(matches) != 1:
        raise ValueError(
            f"latency.{column}=null: {simulated} must match one {column} of the table; set it to one of "
            f"{', '.join(names)}"
        )
    return frame[frame[column] == matches[0]]


def _plain(name: str) -> str:
    """Normalises names so that RTX PRO 6000 and RTXPRO6000 are equal; of a path, uses the last part."""
    return re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower())
