"""Settings that `build` accepts, and the messages with which it refuses others."""

import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from sim.settings.build import ConfigError, build, build_as
from sim.settings.errors import nearest, nearest_names, suggest


class Colour(StrEnum):
    red = "red"
    dark_blue = "dark-blue"


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Shape(Protocol):
    def area_m2(self) -> float: ...


class Signed(Named, Protocol):
    year: int

    def _forge(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A `Signed`, but no `Shape`: its area is no method."""

    name: str = "M"
    year: int = 1984
    area_m2: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Square:
    side_m: float = 1.0

    def __post_init__(self) -> None:
        if self.side_m <= 0:
            raise ValueError(f"side_m={self.side_m}: must be > 0 m")

    def area_m2(self) -> float:
        return self.side_m**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Painting:
    shape: Shape
    num_coats: int = 1
    gloss: bool = False
    colour: Colour = Colour.red
    title: str | None = None
    file: Path | None = None
    frame_m: tuple[float, ...] = ()
    price_usd: dict[str, float] = field(default_factory=dict)
    mood: Literal["calm", "wild"] = "calm"
    extra: Any = None
    signed: Signed | None = None
    backing: Shape | Path | None = None
    details: tuple[Shape, ...] = ()
    twin: Square | None = None

    @classmethod
    def large(cls, num_coats: int) -> "Painting":
        return cls(shape=Square(side_m=9.0), num_coats=num_coats)


def open_painting(path: Path) -> Painting:
    path.read_text()
    return Painting(shape=Square())


def square_of_two():
    return Square(side_m=2.0)


def a_square() -> Square:
    return Square()


HERE = __name__
SQUARE, SIGNATURE = {"_target_": "gallery.Square"}, {"_target_": "gallery.Signature"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Makes this file importable as `gallery`, the module that the targets below name."""
    monkeypatch.setitem(sys.modules, "gallery", sys.modules[__name__])


def painting(**settings):
    shape = {"_target_": "gallery.Square"}
    return {"_target_": "gallery.Painting", "shape": shape, **settings}


def test_builds_nested_targets_before_their_parent():
    built = build(painting(shape={"_target_": "gallery.Square", "side_m": 2}), "art")
    assert built == Painting(shape=Square(side_m=2.0))


def test_builds_targets_in_lists_and_mappings():
    squares = [{"_target_": "gallery.Square", "side_m": side_m} for side_m in (1, 2)]
    built = build(painting(extra={"all": squares}), "art")
    assert built.extra == {"all": [Square(side_m=1.0), Square(side_m=2.0)]}


def test_target_may_be_a_classmethod():
    node = {"_target_": "gallery.Painting.large", "num_coats": 3}
    assert build(node, "art") == Painting(shape=Square(side_m=9.0), num_coats=3)


def test_build_as_takes_the_class_from_the_place():
    assert build_as(Square, {"side_m": 3}, "") == Square(side_m=3.0)


@pytest.mark.parametrize(
    ("name", "given", "built"),
    [
        ("num_coats", 1e3, 1000),
        ("gloss", True, True),
        ("colour", "dark_blue", Colour.dark_blue),
        ("colour", "dark-blue", Colour.dark_blue),
        ("title", None, None),
        ("title", "Dawn", "Dawn"),
        ("title", 1984, "1984"),
        ("file", "a b.txt", Path("a b.txt")),
        ("frame_m", [1, 2.5], (1.0, 2.5)),
        ("price_usd", {"net": 1}, {"net": 1.0}),
        ("mood", "wild", "wild"),
        ("extra", [1, "a"], [1, "a"]),
    ],
)
def test_converts_plain_values(name, given, built):
    value = getattr(build(painting(**{name: given}), "art"), name)
    assert value == built
    assert type(value) is type(built)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_coats": True}, "art.num_coats=true: must be an integer"),
        ({"num_coats": 1.5}, "art.num_coats=1.5: must be an integer"),
        ({"num_coats": "abc"}, "art.num_coats=abc: must be an integer"),
        ({"num_coats": None}, "art.num_coats=null: must be an integer"),
        ({"gloss": 1}, "art.gloss=1: must be true or false"),
        ({"title": 1.5}, "art.title=1.5: must be text (put it in quotes) or null"),
        (
            {"colour": "rad"},
            "art.colour=rad: must be one of the choices; nearest: red; allowed: red, dark_blue",
        ),
        ({"mood": "sad"}, "art.mood=sad: must be one of calm, wild"),
        ({"frame_m": 3}, "art.frame_m=3: must be a list"),
        ({"frame_m": [1, "x"]}, "art.frame_m[1]=x: must be a number"),
        ({"price_usd": {"net": "x"}}, "art.price_usd.net=x: must be a number"),
        ({"shape": 3}, "art.shape=3: must be a Shape: a mapping with a _target_ that names the class"),
        ({"shape": {"_target_": "gallery.Square", "side_m": -1}}, "art.shape.side_m=-1: must be > 0 m"),
        (
            {"shape": {"_target_": "gallery.Square", "sied_m": 1}},
            "art.shape.sied_m: no such setting; nearest: art.shape.side_m; allowed: art.shape.side_m",
        ),
        (
            {"shape": SIGNATURE},
            f"art.shape=signature ({HERE}.Signature): has no area_m2(...); a Shape is needed",
        ),
        (
            {"signed": SQUARE},
            f"art.signed=square ({HERE}.Square): has no name; a Signed is needed",
        ),
        (
            {"backing": SIGNATURE},
            f"art.backing=signature ({HERE}.Signature): has no area_m2(...); a Shape is needed",
        ),
        (
            {"details": [SQUARE, SIGNATURE]},
            "art.details[1]: Signature has no area_m2(...); a Shape is needed",
        ),
        (
            {"twin": SIGNATURE},
            f"art.twin=signature ({HERE}.Signature): is not a Square; a Square is needed",
        ),
        ({"num_coats": SQUARE}, "art.num_coats=Square: must be an integer"),
        ({"num_coats": [1, SQUARE]}, "art.num_coats=[1, Square]: must be an integer"),
        (
            {"shape": {"side_m": None}},
            "art.shape={side_m: null}: must be a Shape: a mapping with a _target_ that names the class",
        ),
        ({"num_coats": "???"}, None),
    ],
)
def test_refuses_with_key_value_and_rule(settings, message):
    if message is None:  # a default that the YAML leaves open although the class has one
        message = "art.num_coats: must be given, for example art.num_coats=1"
    with pytest.raises(ConfigError) as error:
        build(painting(**settings), "art")
    assert str(error.value) == message


def test_no_class_is_called_in_a_place_that_does_not_take_its_objects(tmp_path):
    made = tmp_path / "made"
    for name in ("num_coats", "title", "shape", "twin", "file", "frame_m", "backing"):
        for target in ("os.mkdir", "os.system", "subprocess.Popen"):
            setting = "path" if target == "os.mkdir" else "command" if target == "os.system" else "args"
            node = {"_target_": target, setting: str(made) if setting == "path" else f"touch {made}"}
            for value in (node, [node], {"a": node}):
                with pytest.raises(ConfigError):
                    build(painting(**{name: value}), "art")
    assert not made.exists()


def test_the_class_needed_at_the_root_is_known_before_it_is_called(tmp_path):
    node = {"_target_": "subprocess.Popen", "args": ["touch", str(tmp_path / "made")]}
    with pytest.raises(ConfigError, match=r"^art: Popen is not a Square; a Square is needed$"):
        build(node, "art", Square)
    assert not (tmp_path / "made").exists()


def test_a_function_says_what_it_returns():
    with pytest.raises(ConfigError, match=r"a function with a class as its return annotation"):
        build(painting(twin={"_target_": "gallery.square_of_two"}), "art")
    assert build(painting(shape={"_target_": "gallery.a_square"}), "art").shape == Square()


def test_a_target_is_named_by_its_own_path():
    with pytest.raises(ConfigError, match=r"sys is only imported there; use the module's own path"):
        build({"_target_": "gallery.sys.exit"}, "art")


def test_an_object_with_the_public_members_of_a_protocol_fits_it():
    assert build(painting(signed=SIGNATURE), "art").signed == Signature()


def test_values_are_echoed_as_they_were_written():
    def refuse(width_m: float, max_width_m: float | None, gloss: bool) -> None:
        raise ValueError(f"width_m={width_m}, max_width_m={max_width_m}, gloss={gloss}: no")

    for width_m, text in ((-1, "-1"), (-1.5, "-1.5"), (1e300, "1e+300")):
        with pytest.raises(ConfigError) as error:
            build_as(refuse, {"width_m": width_m, "max_width_m": None, "gloss": True}, "art")
        assert str(error.value) == f"art.width_m={text}, max_width_m=null, gloss=true: no"


def test_refuses_absent_setting_without_default():
    node = {"_target_": "gallery.open_painting"}
    with pytest.raises(ConfigError, match=r"^art\.path: must be given, for example art\.path=FILE$"):
        build(node, "art")


def test_reports_a_file_that_cannot_be_read(tmp_path):
    node = {"_target_": "gallery.open_painting", "path": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match=r"^art: .*No such file.*none"):
        build(node, "art")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "gallery.Sqare",
            r"art\._target_=gallery\.Sqare: module gallery has no Sqare; nearest: Square; allowed: ",
        ),
        ("gallery.Painting.lage", r"class gallery\.Painting has no lage; nearest: large"),
        ("no_such_module_xyz.Thing", r"no module no_such_module_xyz; install it, run in its folder, or add"),
        ("Square", r"must be a dotted path, module\.Class"),
        ("gallery.__name__", r"must be a class or a function, found a str"),
    ],
)
def test_refuses_target_that_cannot_be_imported(target, message):
    with pytest.raises(ConfigError, match=message):
        build({"_target_": target}, "art")


def test_says_what_failed_while_importing_the_users_module(tmp_path, monkeypatch):
    (tmp_path / "broken_policy.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match="importing broken_policy failed: No module named 'no_such_dependency'"
    ):
        build({"_target_": "broken_policy.Mine"}, "art")


def test_refuses_node_without_target():
    with pytest.raises(ConfigError, match=r"^art=3: must be a mapping with a _target_ that names a class$"):
        build(3, "art")


def test_refuses_plain_value_in_place_of_settings():
    with pytest.raises(ConfigError, match=r"^sim=4: must be a mapping of settings$"):
        build_as(Square, 4, "sim")


def test_an_error_of_the_target_itself_is_no_config_error():
    def broken(side_m: float) -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        build_as(broken, {"side_m": 1}, "art")


def test_nearest_finds_dotted_keys_by_their_last_part():
    assert nearest("leep", ["seed", "sim.leap", "sim.until_s"]) == "sim.leap"
    assert nearest("h10_sxm", ["a10g", "h100_sxm", "h200_sxm"]) == "h100_sxm"
    assert nearest("zebra", ["seed", "sim.leap"]) is None


def test_suggest_lists_everything_nearest_first():
    assert suggest("chunkd", ["static", "chunked"]) == "nearest: chunked; allowed: static, chunked"
    assert suggest("zebra", ["static"]) == "allowed: static"
    assert suggest("zebra", []) == "allowed: none"


def test_many_names_are_not_listed_where_a_command_lists_them():
    many = [f"engine_{i}" for i in range(9)]
    assert suggest("engine", many, listed_by="windtunnel list engine") == (
        "nearest: engine_0, engine_1, engine_2; all: windtunnel list engine"
    )
    assert suggest("zebra", many, listed_by="windtunnel list engine") == "all: windtunnel list engine"
    assert suggest("zebra", many[:8], listed_by="x") == f"allowed: {', '.join(many[:8])}"


def test_a_shared_beginning_counts_before_similarity():
    assert nearest_names("b200", ["gb200", "b60", "b200_sxm"])[0] == "b200_sxm"
    assert nearest_names("A100", ["a10g", "a100_pcie", "a100_80gb"], usual=["a100_80gb"]) == [
        "a100_80gb",
        "a100_pcie",
        "a10g",
    ]
    assert nearest_names("qwen2.5-7b", ["qwen3_8b", "qwen2_5_7b"])[0] == "qwen2_5_7b"
