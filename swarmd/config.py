"""TOML, environment and flags -> one frozen NodeConfig. Imports no torch: the daemon reads it too."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelConfig(_Section):
    name: str = "tiny"  # a short name, a Hugging Face repository id, or a local folder
    revision: str | None = None  # commit, tag or branch on the hub; None: the default branch, recorded at first load
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    lora: Literal["auto", "on", "off"] = "auto"  # auto: on above 100 million parameters
    lora_rank: Annotated[int, Field(ge=1, le=512)] = 16
    system_prompt: str | None = None  # None: the built-in one, which asks for <answer>…</answer>; "": none
    threads: Annotated[int, Field(ge=0, le=256)] = 0  # torch threads; 0: one on CPU


class RoundConfig(_Section):
    local: Annotated[int, Field(ge=0, le=1024)] = 4  # I: questions we ask ourselves and answer
    external: Annotated[int, Field(ge=0, le=1024)] = 4  # J: rollouts of others in the batch, at most
    completions: Annotated[int, Field(ge=2, le=64)] = 8  # L
    max_age: Annotated[int, Field(ge=1, le=1000)] = 2  # external rollouts older than this many of our own rounds are forgotten
    rounds: Annotated[int, Field(ge=0)] = 0  # stop after so many; 0: go on for ever
    pace: Annotated[float, Field(ge=0, le=86_400)] = 0.0  # seconds a round takes at least: leaves the machine to others
    checkpoint_every: Annotated[int, Field(ge=1)] = 1  # rounds


class GenerateConfig(_Section):
    max_new_tokens: Annotated[int, Field(ge=0, le=32_768)] = 0  # 0: 16 for the tiny models, 256 for the rest
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0


class TrainConfig(_Section):
    learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0  # 0: 3e-4 for full fine-tuning of small models, 1e-5 for LoRA
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0, le=10)] = 0.28
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    micro_batch_tokens: Annotated[int, Field(ge=0)] = 0  # padded tokens a forward pass may hold; 0: 16,384


class SwarmConfig(_Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")] = "main"
    engine: Literal["libp2p", "none"] = "libp2p"  # none: train alone, open no socket
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)  # multiaddresses; port 0: any free one
    bootstrap: tuple[str, ...] = ()  # multiaddresses ending in /p2p/<peer id>
    curriculum: Literal["auto", "sapo-9", "tiny-9"] = "auto"  # auto: tiny-9 for the tiny models, sapo-9 for the rest


class JudgeConfig(_Section):
    url: str = ""  # "": not judged
    every: Annotated[int, Field(ge=1)] = 1  # rounds between evaluations


class NodeConfig(_Section):
    model: ModelConfig = ModelConfig()
    round: RoundConfig = RoundConfig()
    generate: GenerateConfig = GenerateConfig()
    train: TrainConfig = TrainConfig()
    swarm: SwarmConfig = SwarmConfig()
    judge: JudgeConfig = JudgeConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # None: drawn at the first start and kept with the state
