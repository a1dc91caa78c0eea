"""config.json of EAGLE's layers: flat, or that of the library speculators, which has the layer's inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hwmodels.hf.config import read_hf_config
from realengine.model.architecture import Architecture
from realengine.speculation.settings import DraftSource

INSIDE = "transformer_layer_config"
NOT_COMPUTED = ("norm_before_fc", "fc_norm", "norm_output")
"""Options of vLLM for EAGLE-3 that change what the layer computes, and that are not computed here."""


class Eagle3Options(NamedTuple):
    """The options of an EAGLE-3 draft."""

    taps: tuple[int, ...]
    """The layers of the target of whose inputs the hidden states are read."""
    norm_before_residual: bool = False
    """Whether the layer adds its output to the normed feature, instead of the feature itself."""


def draft_config(source: str | Path) -> dict[str, Any] | None:
    """Returns the layer's fields of a folder's config.json; None: it has none."""
    config = _config_of(source)
    return config if config is None or INSIDE not in config else dict(config[INSIDE])


def eagle3_options(source: DraftSource, num_layers: int) -> Eagle3Options:
    """Returns the options of a draft for a target of num_layers. Raises ValueError for unsupported ones."""
    config = None if isinstance(source, Architecture) else _config_of(source)
    if config is None:
        return Eagle3Options(default_taps(num_layers))
    own: Mapping[str, Any] = config.get("eagle_config") or {}

    def option(name: str, default: object) -> Any:
        return own.get(name, config.get(name, default))

    where = f"speculative_config: model={source}: config.json"
    for name in NOT_COMPUTED:
        if option(name, False):
            raise ValueError(f"{where}: {name}=true is not supported; choose another draft")
    if not option("use_aux_hidden_state", True):
        raise ValueError(f"{where}: use_aux_hidden_state=false is not supported; choose another draft")
    taps = option("eagle_aux_hidden_state_layer_ids", None)
    if taps is None:
        taps = default_taps(num_layers)
    if not taps or any(not isinstance(tap, int) or not 0 <= tap <= num_layers for tap in taps):
        raise ValueError(
            f"{where}: eagle_aux_hidden_state_layer_ids={taps}: must be a list of layers from 0 to "
            f"{num_layers}, those of the target"
        )
    return Eagle3Options(tuple(taps), bool(option("norm_before_residual", INSIDE in config)))


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Returns the layers of a target of at least 2 layers of whose inputs states are read, as in vLLM."""
    return min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)


def _config_of(source: str | Path) -> dict[str, Any] | None:
    path = Path(source).expanduser()
    return read_hf_config(path)[1] if (path / "config.json").is_file() else None
