"""A LoRA step of Flux.1's transformer at 1024 x 1024 pixels, to plan on paper (`pip install diffusers peft`).

cd example && elixir plan flux_lora:make_model --inp flux_lora:batch --step flux_lora:train_step \
    --hardware rtx4090 --host-budget 64GiB

The text encoders and the autoencoder are left out: their outputs are computed once, before the training.
"""

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional

SAMPLES = 4
IMAGE_TOKENS = (1024 // 16) ** 2
"""The autoencoder makes 8 x 8 pixels one, and 2 x 2 of these are a token."""
TEXT_TOKENS = 512
RANK = 16


def make_model() -> nn.Module:
    """Flux.1-dev's transformer, 11.9 B frozen parameters, with adapters at its attention."""
    model = FluxTransformer2DModel(guidance_embeds=True)
    model.requires_grad_(False)
    adapters = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    inject_adapter_in_model(adapters, model)
    model.enable_gradient_checkpointing()
    return model.train()


def batch() -> dict[str, torch.Tensor]:
    """Latents, the noise in them, and the prompt's embeddings, all of them random."""
    return {
        "hidden_states": torch.randn(SAMPLES, IMAGE_TOKENS, 64),
        "encoder_hidden_states": torch.randn(SAMPLES, TEXT_TOKENS, 4096),
        "pooled_projections": torch.randn(SAMPLES, 768),
        "timestep": torch.rand(SAMPLES),
        "guidance": torch.ones(SAMPLES),
        "img_ids": torch.zeros(IMAGE_TOKENS, 3),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
        "velocity": torch.randn(SAMPLES, IMAGE_TOKENS, 64),
    }


def train_step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
    """One step of flow matching: the model predicts the velocity from noise to image."""
    given = dict(inp)
    velocity = given.pop("velocity")
    predicted = model(**given, return_dict=False)[0]
    functional.mse_loss(predicted.float(), velocity.float()).backward()
