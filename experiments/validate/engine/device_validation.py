"""`windtunnel validate device=...`: calibrates this machine and compares runs on it with the simulator.

torch is imported only when the engine is needed: settings are checked without it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.app.run_folder import write_config
from experiments.app.settings.compose import Composition
from experiments.calibrate.engine.files import Files
from experiments.calibrate.engine.settings import MeasureSettings
from experiments.simulate.command import OutputSettings
from experiments.validate.engine.acceptances import check_written, write_measured
from experiments.validate.engine.matrix import Row, print_matrix, write_matrix
from experiments.validate.engine.recording import Recording
from experiments.validate.engine.suite import Case, cases_of, model_of
from experiments.validate.engine.verdict import check_success
from experiments.validate.fidelity.printed import print_files
from experiments.validate.fidelity.settings import ValidateSettings
from hwmodels.model import ModelSpec
from sim.settings.build import build_as
from sim.settings.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceValidation:
    """Settings of a validation on our engine, all checked before anything is measured."""

    settings: ValidateSettings
    output: OutputSettings
    composition: Composition
    device: str
    model: ModelSpec
    block_size: int
    node: dict[str, Any]

    def run(self, config: dict[str, Any], folder: Path, console: Console) -> None:
        """Measures, runs, simulates, compares, writes and prints. Raises ConfigError."""
        engine = _engine()
        calibrated = self._calibrated(folder, engine, console)
        cases = cases_of(self.composition, self.settings.suite, self.device, calibrated)
        reference, attention = engine.reference_of(calibrated), self.settings.attention_backend
        executors = engine.ExecutorCache.of(self.device, reference, attention)
        rows: list[Row] = []
        failed: list[str] = []
        try:
            with console.status("") as status:
                for i, case in enumerate(cases):
                    status.update(f"{case.name}, {i + 1} of {len(cases)}")
                    own = folder if len(cases) == 1 else folder / case.name
                    try:
                        printed = console if len(cases) == 1 else None
                        rows.append(self._run_case(case, own, engine, executors, printed))
                    except (ValueError, RuntimeError) as error:  # the other cases run
                        failed.append(f"case {case.name}: {' '.join(str(error).split())}")
        finally:  # also on Ctrl-C
            if len(cases) > 1 and rows:
                files = write_matrix(folder, rows, page=self.output.report)
                print_matrix(rows, console)
                print_files(files, console)
            elif rows:
                print_files(rows[0].files, console)
        if failed:
            raise ConfigError("; ".join(failed))
        check_success([row.verdict for row in rows])

    def _run_case(
        self, case: Case, folder: Path, engine: Any, executors: Any, console: Console | None
    ) -> Row:
        """Runs, compares and writes a case; its verdict is printed on the console, if there is one.

        A recording that cannot be written ends the command only after the verdict has been printed.
        """
        unwritten: list[OSError] = []

        def save(recording: Recording, number: int) -> None:
            try:
                recording.save(folder / "recordings" / str(number))
            except OSError as error:
                unwritten.append(error)

        verdict, recordings = engine.run_case(case, executors, save)
        if case.settings.write_acceptance is not None:
            write_measured(case.settings.write_acceptance, recordings, case.scenario)
        if console is not None:
            verdict.print(console)
        if unwritten:
            raise unwritten[0]
        write_config(folder, case.config)
        title = f"{case.scenario.model.name} on {case.scenario.hardware.name}: simulated against our engine"
        files = engine.write_verdict(
            folder,
            verdict,
            title=title if folder.name != case.name else f"{title}, {case.name}",
            config=case.config,
            recordings=recordings,
            page=self.output.report,
            tables=self.output.tables,
        )
        return Row(case.name, verdict, files)

    def _calibrated(self, folder: Path, engine: Any, console: Console) -> Files:
        """Returns the machine's calibration files, measured now unless the user has given a folder."""
        if self.settings.calibrated is not None:
            given = Path(self.settings.calibrated)
            files = Files.under(given, engine.machine_name(self.device), self.model.name)
            for file in files:
                if not file.exists():
                    raise ConfigError(
                        f"calibrated={given}: {file.relative_to(given)} is missing; measure it with "
                        f"windtunnel calibrate device={self.device} model=... out={given}"
                    )
            try:
                engine.check_same(files, self.model, self.block_size)
            except (ValueError, KeyError, OSError) as error:
                raise ConfigError(f"calibrated={given}: {error}") from error
            return files
        measure = MeasureSettings(
            device=self.device,
            model=self.model,
            out=str(folder / "calibrated"),
            block_size=self.block_size,
        )
        with console.status("measuring") as status:
            try:
                engine.check(measure, self.node)
                found = engine.measure(measure, self.node, lambda text: status.update(f"measuring: {text}"))
            except (ValueError, RuntimeError, OSError) as error:
                raise ConfigError(" ".join(str(error).split())) from error
        found.write()
        files = found.files
        assert isinstance(files, Files)
        return files


def build(settings: ValidateSettings, cfg: dict[str, Any], composition: Composition) -> DeviceValidation:
    """Checks that every case can be built and run. Raises ConfigError."""
    assert settings.device is not None
    output: OutputSettings = build_as(OutputSettings, cfg["output"], "output")
    cases = cases_of(composition, settings.suite, settings.device, None)
    model, engine = model_of(cases), _engine()
    try:
        executors = engine.ExecutorCache.of(settings.device, attention_backend=settings.attention_backend)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    for case in cases:
        try:
            engine.settings_of(case.scenario, executors.device, case.config)
            engine.check_model(case.scenario.model, case.config["model"], settings.device)
            engine.architecture_of(case.config["model"])
        except ValueError as error:
            where = f"case {case.name}: " if len(cases) > 1 else ""
            raise ConfigError(f"{where}{error}") from error
    try:
        check_written(settings.write_acceptance, [case.scenario for case in cases])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    block_size = cases[0].scenario.caching.block_size
    node = cases[0].config["model"]
    return DeviceValidation(settings, output, composition, settings.device, model, block_size, node)


def _engine() -> Any:
    """Imports the module that needs torch. Raises ConfigError if torch is missing."""
    try:
        return importlib.import_module("experiments.validate.engine.on_engine")
    except ImportError as error:
        raise ConfigError(f"the engine needs {error.name}: pip install 'windtunnel[engine]'") from error
