"""A small model on a real device, priced by its roofline."""

from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

from hwmodels.assembly.roofline import Roofline

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def small_roofline() -> Roofline:
    nodes = [OmegaConf.load(CONFIGS / path) for path in ("model/smollm2_135m.yaml", "hardware/l4.yaml")]
    nodes[1].pop("defaults")  # the calibration that a device brings along
    model, device = (instantiate(node, _convert_="all") for node in nodes)
    return Roofline(model=model, device=device)
