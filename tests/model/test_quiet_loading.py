"""A folder is loaded without a word on the screen, and the user's own settings of transformers stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils import logging

from patchgen.model.generic import quiet_loading

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 16}


def write(folder: Path, kind: str) -> Path:
    """A model with a tensor too many, of which transformers would report."""
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **SMALL))
    model.register_parameter("superfluous", torch.nn.Parameter(torch.zeros(1)))
    model.save_pretrained(folder)
    return folder


def said(code: str, folders: list[Path]) -> str:
    """What a process of its own writes on stderr: transformers keeps the stream that it was imported with."""
    command = [sys.executable, "-c", f"import sys\n{code}", *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.slow
def test_nothing_is_written(tmp_path: Path) -> None:
    folders = [write(tmp_path / kind, kind) for kind in ("dinov2", "dinov3_vit")]  # the second is found by looking
    loud = said("import transformers; transformers.AutoModel.from_pretrained(sys.argv[1])", folders)
    assert "Loading weights" in loud and "superfluous" in loud  # so that silence means something
    code = (
        "from patchgen.model.backbone import load_backbone\nload_backbone(sys.argv[1])\n"
        "slow = {'transformers', 'torch._dynamo', 'sympy', 'torchvision'} & set(sys.modules)\n"
        "assert not slow, slow\n"  # a plain ViT starts without what costs seconds to import
        "load_backbone(sys.argv[2])"
    )
    assert said(code, folders) == ""


@pytest.mark.parametrize("bars", [True, False])
def test_settings_are_put_back(bars: bool) -> None:
    before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
    logging.set_verbosity_info()
    with pytest.raises(OSError), quiet_loading():
        assert not logging.is_progress_bar_enabled() and logging.get_verbosity() == logging.ERROR
        raise OSError
    assert logging.is_progress_bar_enabled() == bars and logging.get_verbosity() == logging.INFO
    (logging.enable_progress_bar if before[0] else logging.disable_progress_bar)()
    logging.set_verbosity(before[1])
