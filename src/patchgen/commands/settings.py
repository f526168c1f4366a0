"""The settings of a run as options of a command: parsed once, into the values that were given.

Help shows the value of each setting that the command would use with the other words, and where it comes from.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from patchgen.commands import HELP, Maybe, option_name, parse, refuse_unknown
from patchgen.config import PRESETS, Config, Settings, config_class, default_of, load_settings, mask_lr, read_settings

O = TypeVar("O", bound="SettingsOptions")  # noqa: E741
S = TypeVar("S", bound=Settings)
Layers = list[tuple[str, Mapping[str, Any]]]  # (where the values come from, values): later ones replace earlier ones

GROUPS: dict[str, tuple[str, ...]] = {
    "data": ("data", "unseen", "benchmark", "options", "split", "holdout", "val_images", "image_size", "normalization",
             "augment", "augmentation", "stain", "cache"),
    "model": ("task", "method", "hparams", "backbone", "pool", "tune", "lora_rank", "refine", "rho_start", "spread",
              "tau", "lambda_ms", "lambda_sim", "lambda_conf", "dropout"),
    "optimisation": ("steps", "batch_per_domain", "lr", "lr_backbone", "lr_module", "optimizer", "lr_schedule",
                     "warmup", "weight_decay", "class_weights", "clip_gradients", "seed"),
    "evaluation": ("eval_every", "patience", "select", "swad", "swad_ratio", "swad_compat"),
    "machine": ("accelerator", "devices", "threads", "precision", "micro_batch", "accumulate",
                "checkpoint_activations", "compile", "deterministic"),
    "mdg_gcd": ("known", "unlabelled", "labelled_share", "num_classes"),
}  # fmt: skip
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
STREAM = "stream"  # the group of settings that only streams have


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingsOptions:
    """The options of a command that also takes the settings of a run."""

    command: ClassVar[str]
    kinds: ClassVar[tuple[type[Settings], ...]] = (Config,)  # their fields are options; one of another task is refused
    hidden: ClassVar[Collection[str]] = ()  # fields that are no options of this command
    texts: ClassVar[Mapping[str, str]] = {}  # help of fields whose meaning differs here

    def layers(self, given: Mapping[str, Any]) -> Layers:
        """The values behind the given ones."""
        raise NotImplementedError

    def task(self, given: Mapping[str, Any]) -> Any:
        return given.get("task")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartOptions(SettingsOptions):
    """Where the settings that are not given come from."""

    preset: Maybe[Literal["small", "paper", "quick"]] = None
    """`small` (the default): minutes on two cores. `paper`: the published protocol (5001 steps, DomainNet 15001).
    `quick`: that of `fit --quick`."""
    config: Maybe[str] = None
    """YAML file of settings (such as a run's config.yaml) to start from instead of a preset."""

    def layers(self, given: Mapping[str, Any]) -> Layers:
        """The values of the file, or of the preset, for the given settings."""
        if self.config is None:
            return preset_layers(self.preset or "small", given)
        needed = {name: given[name] for name in ("data", "unseen") if name in given}
        return [(self.config, vars(load_settings(self.config, **needed)))]

    def task(self, given: Mapping[str, Any]) -> Any:
        """The task that was given, or that of the file."""
        if self.config and self.preset:
            raise ValueError("--config and --preset exclude each other: the file holds what a preset would set")
        return given.get("task") or (read_settings(self.config).get("task") if self.config else None)


def parse_settings(command: type[O], argv: list[str]) -> tuple[O, dict[str, Any]]:
    """The command's own options, and the settings that were given, as name -> value."""
    config = (tyro.conf.PositionalMetavarFromFieldName, tyro.conf.OmitArgPrefixes)
    words = [word for word in argv if word not in HELP]
    kinds: tuple[type[Any], ...] = (command, *command.kinds)
    known = [f.name for each in kinds for f in dataclasses.fields(each) if f.name not in command.hidden]
    options, given = parse(settings_schema(command), command.command, words, config, known), dict[str, Any]()
    for group in (*GROUPS, STREAM):
        settings = getattr(options, group, {})
        given |= {key: dict(value) if key in ("hparams", "options") else value for key, value in settings.items()}
    kind = config_class(options.task(given))
    fields = {field.name for field in dataclasses.fields(kind)}
    if foreign := [key for key in given if key not in fields]:
        refuse_unknown([option_name(foreign[0])], fields)
    if len(words) < len(argv):
        shown = settings_schema(command, kind, in_force(kind, options.layers(given), given))
        parse(shown, command.command, ["--help"], config)
    return options, given


def settings_schema(
    command: type[SettingsOptions], kind: type[Settings] | None = None, values: Mapping[str, str] = {}
) -> Any:
    """The dataclass `command` with a TypedDict of given settings per group; for help, of one `kind` with `values`."""
    texts = {**field_help(kind), **command.texts} if kind else {}
    hints: dict[str, list[Any]] = {}
    for each in (kind,) if kind else command.kinds:
        types = get_type_hints(each)
        for field in dataclasses.fields(each):
            if field.name not in command.hidden:
                hints.setdefault(field.name, []).append(types[field.name])
    groups: dict[str, dict[str, Any]] = {group: {} for group in (*GROUPS, STREAM)}
    for name, alternatives in hints.items():
        hint: Any = Union[tuple(alternatives)]  # noqa: UP007
        about = tyro.conf.arg(help=texts.get(name, "").replace("\n", " "), help_behavior_hint=values.get(name, ""))
        if get_origin(hint) is dict:  # read as pairs: unlike a dictionary, they may be left out
            hint = tuple[tuple[*get_args(hint)], ...]  # type: ignore[misc]
        place = tyro.conf.Positional[hint] if name == "data" else hint  # type: ignore[misc]
        groups[GROUP_OF.get(name, STREAM)][name] = Annotated[place, about]
    made = {group: TypedDict(group, members, total=False) for group, members in groups.items() if members}  # type: ignore[operator]
    return dataclasses.make_dataclass(
        command.__name__, made.items(), bases=(command,), namespace={"__doc__": command.__doc__}, frozen=True,
        kw_only=True,
    )  # fmt: skip


def field_help(kind: type) -> dict[str, str]:
    """The text below each field of a settings class, its own and inherited ones."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if dataclasses.is_dataclass(each):
            [tree] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            body = tree.body  # type: ignore[attr-defined]
            for field, text in zip(body, body[1:], strict=False):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        texts[name] = words
    return texts


def in_force(kind: type[Settings], layers: Layers, given: Mapping[str, Any]) -> dict[str, str]:
    """What help says of each setting: its value, and where it comes from unless that is the default."""
    shown = {}
    for field in dataclasses.fields(kind):
        value, origin = default_of(field), ""
        for source, values in (*layers, ("given", given)):
            if field.name in values and values[field.name] != value:
                value, origin = values[field.name], f", {source}"
        if value is dataclasses.MISSING:
            shown[field.name] = "(required)"
        elif value is not None and value != {}:
            text = " ".join(f"{name} {inner}" for name, inner in value.items()) if isinstance(value, dict) else value
            shown[field.name] = f"({text}{origin})" if origin else f"(default: {text})"
    return shown


def preset_layers(preset: str, given: Mapping[str, Any]) -> Layers:
    """The values of a preset for the given task, method, backbone and data."""
    name = f"preset {preset}"
    value: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)} | {"data": ""} | dict(given)
    method = value["method"]
    if value["task"] == "ccd":
        from patchgen.ccd.settings import stream_preset

        return [(name, stream_preset(preset, value["data"]))]
    if preset == "small":  # the others need the methods, and so torch
        return [(name, PRESETS[preset]), (f"{name} of {method}", mask_lr(method))]
    from patchgen.methods.presets import preset_settings, published

    settings = preset_settings(preset, method, value["data"], value["benchmark"])
    layers: Layers = [(name, PRESETS[preset]), (f"{name} of {method}", settings)]
    if preset == "paper":
        names = ("data", "benchmark", "method", "backbone")
        released = published(*(value[each] for each in names), task=value["task"], swad=value["swad"])
        layers.append((f"published for {method}", released))
    return layers


def merged(layers: Layers, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all layers under the given ones; hyper-parameters are merged one by one."""
    settings: dict[str, Any] = {}
    for _, values in (*layers, ("given", given)):
        hparams = {**settings.get("hparams", {}), **values.get("hparams", {})}
        settings |= {**values, **({"hparams": hparams} if hparams else {})}
    return settings


def settings_of(config: type[S], layers: Layers, given: Mapping[str, Any]) -> S:
    """The settings of a run; errors name the option."""
    names = {field.name for field in dataclasses.fields(config)}
    values = {name: value for name, value in merged(layers, given).items() if name in names}
    for field in dataclasses.fields(config):
        if default_of(field) is dataclasses.MISSING and field.name not in values:
            word = field.name.upper() if field.name == "data" else option_name(field.name)
            raise ValueError(f"{word} is missing: {field_help(config)[field.name]}")
    try:
        return config(**values)
    except ValueError as error:
        first, _, rest = str(error).partition(" ")
        raise ValueError(f"{option_name(first)} {rest}" if first in names else str(error)) from error


def configs_of(
    labels: Sequence[str], given: Mapping[str, Any], layers: Callable[[Mapping[str, Any]], Layers]
) -> list[Config]:
    """The settings of several methods, each with the given hyper-parameters that it has."""
    from patchgen.methods.presets import method_settings, own_hparams

    hparams, configs = given.get("hparams", {}), []
    unknown = set(hparams)
    for label in labels:
        settings = {**given, **method_settings(label)}
        settings["hparams"] = own_hparams(hparams, settings["method"])
        unknown -= settings["hparams"].keys()
        configs.append(settings_of(Config, layers(settings), settings))
    if unknown:
        raise ValueError(f"--hparams {min(unknown)}: none of the methods has it (`patchgen methods` lists them)")
    return configs
