"""Manifests, settings, recipes, schedules and command lines as people and editors spoil them (hypothesis strategies).

Sizes are kept so small that an input which happens to be right is trained in a second.
"""

import dataclasses
import string
from typing import Any, Literal, get_args, get_origin, get_type_hints

from conftest import CLASSES, DOMAINS
from hypothesis import strategies as st

from chaos.ground import PER_CLASS, RUN, STREAM
from patchgen.ccd.settings import StreamConfig
from patchgen.config import Config

WORDS = (
    "", " ", "studio", "none", "null", "~", "yes", "nan", "-1", "0", "1e9", "1e-3", "0x10", "../..", "/", "\\", "a,b",
    "patchgen", "lp", "patchgen+miro", "++", "@", "ünï", "a\nb", "\x00", "\ufeff", "$HOME", "${X}", "%s", "{}", "[]",
)  # fmt: skip
# settings whose large values would start processes, or train for hours: only wrong ones are tried
COSTLY = frozenset({"steps", "epochs", "devices", "eval_every", "projection_hidden", "projection_out", "inits",
                    "projection_bottleneck", "replay", "accumulate"})  # fmt: skip
# a right setting that starts a compiler, which takes a minute: no bad input
LONG = ("compile", True)
METHODS = ("patchgen", "lp", "lp-ln", "patchgen+miro", "promptccd", "simgcd", "gcd+patchgen", "mixup", "arm", "a+b",
           "+")  # fmt: skip
text = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
wrong = st.sampled_from([None, True, -1, 0, 0.5, float("nan"), float("inf"), "x", [], [1], {}, {"a": 1}, "2024-13-45"])
whole = st.one_of(st.integers(0, 4), st.sampled_from([-1, 14, 28, 29, 42, 1000, 10**6, 2**31, 2**32, 2**63, 10**30]))
share = st.one_of(st.floats(0, 1), st.floats(), st.sampled_from([0, 1, 1e-30, 1e30, -1e-9, 2]))
number = st.one_of(whole, share)
value = st.one_of(wrong, number, text, st.lists(text, max_size=2), st.dictionaries(text, number, max_size=2))
RIGHT = {int: whole, float: share, bool: st.booleans(), str: text}


def _right(name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values of the kind that a setting has, in or out of its range."""
    inner = get_args(hint)
    kind = inner[0] if type(None) in inner else hint
    if name == "method":
        return st.sampled_from(METHODS)
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is dict:
        names = st.sampled_from(["miro", "alpha", "crctp_fold", ""])
        return st.dictionaries(names, share if get_args(kind)[1] is float else text, max_size=2)
    return RIGHT[kind]


def _changes(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some settings: mostly of the right kind, at times of any, or under a name that is none."""
    every = get_type_hints(kind)
    hints = {field.name: every[field.name] for field in dataclasses.fields(kind)}
    right = [st.tuples(st.just(name), _right(name, hint)) for name, hint in hints.items() if name not in COSTLY]
    odd = st.tuples(st.sampled_from([*hints, "stepz"]), wrong)
    one = st.one_of(st.one_of(right), st.one_of(right), st.one_of(right), odd).filter(lambda pair: pair != LONG)
    return st.lists(one, min_size=1, max_size=3).map(lambda pairs: dict(pairs))


RUNS, STREAMS = {"data": "photos", **RUN}, {"data": "shapes", "schedule": "stages.yaml", **STREAM}
settings = st.one_of(
    *[_changes(Config).map(lambda changes: {**RUNS, "steps": 2, **changes})] * 2,
    _changes(StreamConfig).map(lambda changes: {**STREAMS, "epochs": 2, **changes}),
)


def _yaml(content: Any) -> str:
    import yaml

    return yaml.safe_dump(content, allow_unicode=True)


broken_yaml = st.one_of(
    st.sampled_from(["", "[", "a: [", "- 1\n- 2", "just words", "a: &a [*a]", "? {a: b}", "!!python/object:os.system x",
                     "a: !!binary x", "\t", "---\n---\n", "a: 2024-13-45", "a: 1\na: 2", "[" * 3000, "&a [" * 20,
                     "x: " + "9" * 5000, "\x00", "%YAML 9.9\n---\na: 1"]),
    st.text(max_size=40),
)  # fmt: skip
setting_files = st.one_of(settings.map(_yaml), settings.map(_yaml), broken_yaml)

_axis = st.sampled_from(["seed", "lr", "unseen", "method", "tau", "hparams.a", "known", "backbone", "task"])
_grid = st.dictionaries(_axis, st.one_of(st.lists(value, max_size=2), st.lists(number, max_size=2), value), max_size=2)
_row = st.fixed_dictionaries({"name": text}, optional={"method": st.sampled_from(METHODS), "lr": share, "pool": value})
_recipe = st.tuples(settings, _grid, st.one_of(value, st.lists(_row, max_size=2)))
recipes = st.one_of(_recipe.map(lambda drawn: _yaml({**drawn[0], "grid": drawn[1], "rows": drawn[2]})), broken_yaml)

_groups = st.lists(st.lists(st.sampled_from([*"abc", "d", 1, None]), max_size=3), max_size=3)
_ratios = st.lists(st.lists(st.floats(-1, 2), max_size=3), max_size=3)
_schedule = {
    "groups": st.one_of(value, _groups, st.just([["a", "b"], ["c"]])),
    "ratios": st.one_of(value, _ratios, st.just([[0.6, 1.0], [1.0]])),
}
schedules = st.one_of(st.fixed_dictionaries(_schedule, optional={"seed": value}).map(_yaml), broken_yaml)

# Manifests

cell = st.one_of(
    st.sampled_from([*DOMAINS, *CLASSES, "", " ", "nan", '"', ",", "a\nb", "../../x.png", "/etc/passwd", "x.png"]),
    st.tuples(st.sampled_from(DOMAINS), st.sampled_from(CLASSES), st.integers(0, 7)).map(
        lambda drawn: f"photos/{drawn[0]}/{drawn[1]}/{drawn[2]:02d}.png"
    ),
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6),
)


def _right_rows(count: int) -> list[list[str]]:
    names = [(d, c, i) for d in DOMAINS for c in CLASSES for i in range(PER_CLASS)]
    return [[f"photos/{d}/{c}/{i:02d}.png", d, c, f"p{i}"] for d, c, i in names][:count]


@st.composite
def manifests(draw: st.DrawFn) -> bytes:
    """A right manifest with some cells, lines or bytes spoilt."""
    rows = [["path", "domain", "label", "group"], *_right_rows(draw(st.integers(0, 36)))]
    for _ in range(draw(st.integers(0, 3))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        action = draw(st.sampled_from(["cell", "cell", "drop", "add", "copy", "label"]))
        if action == "cell" and row:
            row[draw(st.integers(0, len(row) - 1))] = draw(cell)
        elif action == "drop" and row:
            row.pop()
        elif action == "add":
            row.append(draw(cell))
        elif action == "copy":
            rows.append(list(row))
        elif len(row) > 2:
            row[2] = ""
    quote = draw(st.booleans())
    line_end, separator = draw(st.sampled_from(["\n", "\r\n", "\r"])), draw(st.sampled_from([",", ",", ",", ";", "\t"]))
    lines = (separator.join(f'"{c}"' if quote and '"' not in c else c for c in row) for row in rows)
    content = line_end.join(lines).encode(draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16"])), "replace")
    cut = draw(st.one_of(st.none(), st.integers(0, len(content))))
    return content[:cut] + draw(st.sampled_from([b"", b"", b"", b"\x00", b"\xff\xfe", b'"', b"\n" * 50]))


# Command lines

COMMANDS = {
    "train": ("--unseen", "--method", "--lr", "--preset", "--config", "--image-size", "--known", "--task", "--seed",
              "--backbone", "--hparams", "--options", "--benchmark", "--tau", "--threads", "--num-classes"),
    "predict": ("--csv", "--jsonl", "--json", "--batch", "--checkpoint", "--strict"),
    "explain": ("--out", "--relative", "--alpha", "--checkpoint"),
    "report": ("--out", "--part"),
    "runs": ("--json", "diff", "clean", "--failed", "--keep-checkpoints"),
    "doctor": ("--benchmark", "--json", "--no-decode", "--splits", "--split", "--seed", "--holdout"),
    "sweep": ("--dry-run", "--out", "--workers", "--engine", "--rate"),
    "datasets": ("--json",), "methods": ("--json",), "oracle": ("list", "--json"), "export": ("--out", "--count"),
    "evaluate": ("--json", "--out"), "splitz": ("--x",),
}  # fmt: skip
word = st.one_of(
    st.sampled_from(
        ["photos", "photos/studio", "model", "RUN", "nowhere", "recipe.yaml", "spoilt", "1", "studio", *WORDS]
    ),
    st.text(alphabet=string.printable, max_size=6),
    number.map(str),
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Words of a real command in a wrong order, number or spelling."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    words = [name]
    if draw(st.booleans()):
        words += draw(st.sampled_from([["photos"], ["RUN", "photos"], ["model"], ["recipe.yaml"]]))
    for _ in range(draw(st.integers(0, 3))):
        words += [draw(st.sampled_from(COMMANDS[name])), *draw(st.lists(word, max_size=2))]
    return [w.replace("\x00", "") for w in words]


known_names = st.lists(st.sampled_from([*CLASSES, "x", "", " ", "half", "lreg", ",", "Circle"]), max_size=3).map(
    ",".join
)

# Backbones

_architecture = st.sampled_from(
    ["hidden_size", "patch_size", "image_size", "num_attention_heads", "num_hidden_layers", "mlp_ratio", "hidden_act",
     "model_type", "num_register_tokens", "layer_norm_eps", "architectures", "dtype", "auto_map"]
)  # fmt: skip
_files = ("config.json", "config.json", "model.safetensors", "model.safetensors", "settings", "settings", "pickle")
backbones = st.fixed_dictionaries(
    {"change": st.sampled_from([*_files, "normalisation", "pipe"]), "seed": st.integers(0, 2**32 - 1),
     "settings": st.dictionaries(_architecture, st.one_of(wrong, st.integers(-2, 99)), min_size=1, max_size=2),
     "normalisation": st.dictionaries(st.sampled_from(["image_mean", "image_std"]),
                                      st.one_of(value, st.lists(share, min_size=3, max_size=3)))}
)  # fmt: skip
