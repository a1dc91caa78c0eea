"""Settings of `windtunnel observe`: the server, the workload, and when to give up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fieldlimits import Checked, Gt, NonNegative, NonNegativeInt, Positive, PositiveInt, check
from sim.metrics.dialects import MetricsSettings
from sim.metrics.slo import Slo, check_no_workload_terms
from sim.settings.build import build_as
from sim.settings.errors import ConfigError
from sim.workload.base import Workload

PATHS = {"completions": "completions", "chat": "chat/completions"}
WHOLE_RUN = MetricsSettings()
DEFAULT_CONTEXT = 4096
"""Maximum of prompt plus output tokens, if neither the server nor the user gives one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveSettings(Checked):
    """One observed run.

    exact_output: request exactly the workload's output tokens and ignore EOS; otherwise its max_tokens, if
    any. prompts: form of the prompts; auto: token ids if the server accepts them. token_ids: range of random
    token ids, the end excluded. late_ms: a request sent later than this after its scheduled time counts as
    late. silence_timeout_s: a connection that receives no data for this long has failed. give_up_after:
    number of lost connections in a row after which no more requests are sent.
    """

    url: str
    workload: Workload
    slo: Slo | None = None
    served_model_name: str | None = None
    api: Literal["completions", "chat"] = "completions"
    prompts: Literal["auto", "token_ids", "text"] = "auto"
    token_ids: tuple[int, int] = (1000, 10_000)
    exact_output: bool = True
    temperature: NonNegative = 0.0
    max_model_len: Annotated[int | None, Gt(0)] = None
    api_key_env: str = "OPENAI_API_KEY"
    until_s: Positive | None = None
    late_ms: Positive = 10.0
    connect_timeout_s: Positive = 10.0
    silence_timeout_s: Positive = 300.0
    give_up_after: PositiveInt = 20
    seed: NonNegativeInt = 0
    metrics: MetricsSettings = WHOLE_RUN
    report: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        check(self)
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={self.url}: must be an address such as http://localhost:8000")
        if parts.username or parts.password:
            raise ValueError(
                "url: must not contain a password, as it is written to config.yaml; put the key in the "
                f"environment variable {self.api_key_env}"
            )
        low, end = self.token_ids
        if not 0 <= low < end:
            raise ValueError(f"token_ids=[{low},{end}]: must be two integers >= 0, the second one larger")
        if self.api == "chat" and self.prompts == "token_ids":
            raise ValueError(
                "prompts=token_ids, api=chat: chat messages are text; choose prompts=text or prompts=auto"
            )
        check_no_workload_terms(self.slo, "observe")
        answers = getattr(getattr(self.workload, "branching", None), "width", 1)
        if answers > 1:
            raise ValueError(
                f"workload.branching.width={answers}: observe supports one output per request; set it to 1"
            )

    @property
    def base_url(self) -> str:
        """Address of the API up to /v1, also if the URL has a part of the path already."""
        url = self.url.rstrip("/")
        for path in sorted(
            PATHS.values(), key=len, reverse=True
        ):  # the longer first, because it ends with the shorter
            url = url.removesuffix(f"/{path}")
        return url if url.endswith("/v1") else f"{url}/v1"


def build_settings(cfg: dict[str, Any]) -> ObserveSettings:
    """Returns the settings of a composed config. Raises ConfigError."""
    if cfg["url"] == "???":
        raise ConfigError("url: must be given, for example url=http://localhost:8000")
    settings = {**cfg, "slo": cfg["slo"] or None}  # slo=none
    settings["metrics"] = build_as(MetricsSettings, cfg["metrics"], "metrics")
    built: ObserveSettings = build_as(ObserveSettings, settings, "")
    return built
