"""PatchGen in your own training loop: any backbone, a plain PyTorch DataLoader and optimiser, and the map of an image.

python examples/own_loop.py --backbone tiny --size 56 --steps 20
"""

import torch
import tyro
from torch.utils.data import DataLoader, TensorDataset

import patchgen


def main(backbone: str = "auto", size: int = 112, steps: int = 100, out: str = "map.png") -> None:
    """Train on random images in which a bright patch shows the class, then draw a map.

    Args:
        backbone: A name, folder or file; in Python, also a model object of transformers or timm.
        size: Side of the images, a multiple of the backbone's patch size.
    """
    images, labels = your_images(256, size)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)

    encoder = patchgen.load_backbone(backbone, image_size=size)
    patchgen.set_tuning(encoder, "layernorm")  # or "head", "last_block", "full"
    model = patchgen.Classifier(encoder, num_classes=2, image_size=size, pool="patchgen")
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (encoder.mean, encoder.std))
    model.start((images[:32] - mean) / std)  # scales the first masks to this backbone
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    for _ in range(steps):
        pixels, target = next(iter(loader))
        output = model((pixels - mean) / std)  # .logits (B, C), .mask (B, P), .features (B, D)
        loss = patchgen.cross_entropy(output.logits, target)
        loss = loss + 1e-3 * patchgen.mask_suppression(output.selection())
        loss = loss + patchgen.selected_confidence(output.logits, target)
        loss = loss + 1e-3 * patchgen.class_similarity(output.features, target, num_classes=2)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"loss {loss.item():.3f}, mean mask {output.selection().mean():.2f}")

    with torch.no_grad():
        output = model((images[:1] - mean) / std)
    picture = (255 * images[0].permute(1, 2, 0)).byte().numpy()
    top = tuple((f"class {i}", p) for i, p in enumerate(output.logits.softmax(1)[0].tolist()))
    patchgen.Explanation(None, picture, output.selection()[0].view(model.grid).numpy(), top).overlay().save(out)


def your_images(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a red or green square; yours are (N, 3, H, W) in [0, 1], and class numbers."""
    images, labels = torch.rand(count, 3, size, size), torch.arange(count) % 2
    for image, label in zip(images, labels, strict=True):
        image[label, : size // 4, : size // 4] = 1
    return images, labels


if __name__ == "__main__":
    tyro.cli(main)
