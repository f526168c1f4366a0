"""Predict with an exported model where neither torch nor patchgen is installed: numpy, Pillow and onnxruntime.

patchgen export photos-model --out photos.onnx
pip install numpy pillow onnxruntime
python examples/onnx_inference.py photos.onnx a.jpg b.jpg
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image


def read(path: str, size: int, interpolation: str) -> np.ndarray:
    """(3, S, S) float32 in 0..1, resized as the model was trained: Pillow's filters antialias."""
    with Image.open(path) as image:
        square = image.convert("RGB").resize((size, size), Image.Resampling[interpolation.upper()])
    return np.asarray(square, np.float32).transpose(2, 0, 1) / 255


def main(model: str, *images: str) -> None:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    classes, size = json.loads(facts["classes"]), int(facts["image_size"])
    pixels = np.stack([read(path, size, facts["interpolation"]) for path in images])
    probabilities, *mask = session.run(None, {"pixels": pixels})  # (N, C) and, where there is a mask, (N, h, w)
    for i, path in enumerate(images):
        best = probabilities[i].argmax()
        level = f"\tmask mean {mask[0][i].mean():.2f}" if mask else ""
        print(f"{path}\t{classes[best]}\t{probabilities[i, best]:.4f}{level}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
