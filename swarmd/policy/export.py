"""Export a checkpoint as a model for transformers or peft, with tokenizer and model card."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
from transformers.utils import logging as transformers_logging

from p2p import durable
from swarmd.config.config import NodeConfig
from swarmd.config.curriculum_name import BUILT_IN
from swarmd.errors import CannotRecord, ConfigError
from swarmd.policy.inference.modelfile import MAX_CONTEXT_TOKENS, modelfile
from swarmd.policy.models import hub
from swarmd.policy.models.architecture import context_of, has_other_parts, read_config
from swarmd.policy.models.device import DTYPES
from swarmd.policy.models.files.model_folder import TOKENIZER_FILES, read_config_json, small_files
from swarmd.policy.models.files.to_gguf import write_gguf
from swarmd.policy.models.fit import chat_of, work_of
from swarmd.policy.models.hub import REPOSITORIES
from swarmd.policy.models.load import fingerprint_of, in_peft, load_weights, lora_config
from swarmd.policy.models.lora import NF4, fold, require_nf4, round_to_four_bits
from swarmd.policy.models.tiny import WEIGHTS as TINY
from swarmd.policy.models.tokenizer import load_tokenizer
from swarmd.policy.training import policy_files
from swarmd.state.logs import installed_version
from swarmd.types import RoundLine, Score

APACHE: Final = "apache-2.0"  # the licence of every model that has a short name
# The first and the last reward are means over this many rounds.
EDGE_ROUNDS: Final = 10


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run, from its metrics.jsonl; None for a figure that was not measured."""

    rounds: int
    hours: float  # sum of the rounds' durations
    reward_first: float | None  # mean reward of own completions in the first rounds
    reward_last: float | None
    edge: int  # rounds over which each of these two rewards is averaged
    external_share: float | None  # share of other nodes' rollouts among those trained on
    tokens_generated: int
    tokens_trained: int
    judge_score: float | None  # pass@1 of the last evaluation
    judge_n: int | None

    @property
    def untrained(self) -> bool:
        return self.rounds > 0 and not self.tokens_trained


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of an exported model."""

    base: str  # repository, folder or short name
    repository: bool  # whether `base` is a repository of the hub
    revision: str | None
    lora_rank: int | None
    adapter_only: bool
    dtype: str
    curriculum: str
    version: str  # swarmd's version
    # Share of the adapter's energy that merging lost to rounding (`lora.fold`); None if nothing was merged.
    lost: float | None = None


def figures_of(lines: Iterable[RoundLine]) -> Figures:
    """Summarise a run for the model card.

    lines: in order of rounds. They are read one by one, as a long run has many.
    """
    rewards, sums, rounds, seconds = list[float](), Counter[str](), 0, 0.0
    judged: Score | None = None
    for line in lines:
        rounds, judged = line.round, line.judge or judged
        if line.reward_mean is not None:
            rewards.append(line.reward_mean)
        sums.update(
            local=line.local,
            external=line.external,
            generated=line.tokens.generated,
            trained=line.tokens.trained,
        )
        seconds += sum(line.seconds.values())
    edge = max(1, min(EDGE_ROUNDS, len(rewards) // 2))
    trained = sums["local"] + sums["external"]
    return Figures(
        rounds=rounds,
        hours=seconds / 3600,
        reward_first=fmean(rewards[:edge]) if rewards else None,
        reward_last=fmean(rewards[-edge:]) if rewards else None,
        edge=edge,
        external_share=sums["external"] / trained if trained else None,
        tokens_generated=sums["generated"],
        tokens_trained=sums["trained"],
        judge_score=judged.score if judged else None,
        judge_n=judged.n if judged else None,
    )


def card(origin: Origin, figures: Figures) -> str:
    """Write the README.md of the exported folder."""
    library = "peft" if origin.adapter_only else "transformers"
    base = [f"base_model: {origin.base}"] if origin.repository else []
    licence = [f"license: {APACHE}"] if origin.base in (*TINY, *REPOSITORIES.values()) else []
    gym = origin.curriculum in BUILT_IN
    tags = f"tags: [swarmd, sapo, grpo{', reasoning-gym' * gym}]"
    head = ["---", *base, *licence, f"library_name: {library}", "pipeline_tag: text-generation", tags, "---"]
    name = origin.base.rstrip("/").rpartition("/")[2]
    what = "A LoRA adapter for" if origin.adapter_only else "A model trained from"
    if figures.untrained:
        what = "Not trained yet, so without effect: " + what[0].lower() + what[1:]
    at = f" at revision `{origin.revision}`" if origin.revision else ""
    method = (
        f"a LoRA adapter of rank {origin.lora_rank} on every linear layer but the head"
        if origin.lora_rank
        else "all weights"
    )
    merged = ", merged into the base weights" if origin.lora_rank and not origin.adapter_only else ""
    rounding = [f"- {lost}"] if (lost := loss_of(origin)) else []
    linked = f"[{origin.base}](https://huggingface.co/{origin.base})" if origin.repository else f"`{name}`"
    share = "none" if figures.external_share is None else f"{100 * figures.external_share:.0f} %"
    took = f"{figures.hours:.1f} hours" if figures.hours >= 1 else f"{60 * figures.hours:.1f} minutes"
    text = [
        f"# {name}, trained with swarmd",
        "",
        (
            f"{what} {linked}{at}, by swarmd {origin.version}: GRPO on"
            f" {'ReasoningGYM' if gym else 'own'} questions,"
            " on a node's own rollouts and on those that other nodes of a swarm"
        ),
        "shared with it (SAPO, arXiv 2509.08721). Every reward was computed by the node itself.",
        "",
        "## Use",
        "",
        *_snippet(adapter=origin.adapter_only),
        "",
        "An answer stands between `<answer>` and `</answer>`.",
        "",
        "## How it was made",
        "",
        f"- Curriculum: {origin.curriculum}",
        f"- Trained: {method}{merged}; {origin.dtype}",
        *rounding,
        (
            f"- Rounds: {figures.rounds:,}, {took}; {figures.tokens_generated:,} tokens"
            f" generated, {figures.tokens_trained:,} trained on"
        ),
        f"- Share of other nodes' rollouts in the training: {share}",
        "",
        "## Results",
        "",
        "| figure | value |",
        "|---|---|",
        (
            f"| mean reward of the node's answers, first {figures.edge} rounds |"
            f" {_three(figures.reward_first)} |"
        ),
        (
            f"| mean reward of the node's answers, last {figures.edge} rounds |"
            f" {_three(figures.reward_last)} |"
        ),
        (
            f"| judge, pass@1{f' of {figures.judge_n:,} answers' if figures.judge_n else ''} |"
            f" {_three(figures.judge_score)} |"
        ),
        "",
        (
            "The rewards are of answers sampled during training, on training questions; the judge's are of"
            " greedy answers to held-out ones."
        ),
        f"The licence is the base model's{f', {APACHE}' if licence else ''}.",
        "",
    ]
    return "\n".join([*head, "", *text])


def _snippet(*, adapter: bool) -> list[str]:
    library, kind = (
        ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
    )
    return [
        "```python",
        *(
            ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer"]
            if adapter
            else []
        ),
        *([] if adapter else [f"from {library} import {kind}, AutoTokenizer"]),
        "",
        'path = "."  # this folder, or the repository that it was pushed to',
        f"tokenizer, model = AutoTokenizer.from_pretrained(path), {kind}.from_pretrained(path)",
        'messages = [{"role": "user", "content": "What is 12 + 30?"}]',
        (
            "inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True,"
            ' return_tensors="pt")'
        ),
        "made = model.generate(**inputs, max_new_tokens=256)",
        'print(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        "```",
    ]


def loss_of(origin: Origin) -> str | None:
    """Describe the loss of merging and how to avoid it; None if it is too small to matter."""
    if origin.lost is None or origin.lost < 5e-4:
        return None
    return (
        f"Rounding the merged weights W + ΔW to {origin.dtype} lost {100 * origin.lost:.1f} % of the"
        " adapter's energy, the sum of ΔW²; answers change accordingly. `swarmd export --adapter` writes"
        " the exact adapter."
    )


def _three(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


# The files of a checkpoint that an export needs.
FILES: Final = ("policy.json", "weights.safetensors")


@dataclass(frozen=True, slots=True)
class Exported:
    folder: Path
    origin: Origin
    figures: Figures

    def document(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "model": asdict(self.origin), "run": asdict(self.figures)}


def export(
    files: Mapping[str, bytes],
    metrics: Iterable[RoundLine],
    curriculum: str,
    out: Path,
    *,
    adapter_only: bool = False,
    ollama: NodeConfig | None = None,
    gguf: bool = False,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Exported:
    """Write the checkpoint's model into the folder `out`, which must be new or empty, atomically.

    Args:
        files: the contents of FILES.
        metrics: the lines of its rounds in metrics.jsonl.
        curriculum: the curriculum's name.
        out: the folder, or with `gguf` the file.
        adapter_only: write the adapter without the base model.
        ollama: the node's configuration; if given, a Modelfile is written too.
        gguf: write a GGUF file.
        loading: context that is entered while the base model is looked up and loaded.

    Raises:
        ConfigError: if these options do not fit together or the checkpoint.
        NoModel, Unreachable: if the base model is not available.
        CheckpointUnfit: if the base model is not the one that was trained.
        CannotRecord: if the disk rejects the files.
    """
    identity = policy_files.described(files["policy.json"])
    if adapter_only + gguf + (ollama is not None) > 1:
        raise ConfigError("--adapter, --ollama and --gguf write different things. Give one of them.")
    if adapter_only and identity.lora_rank is None:
        raise ConfigError(
            "this run trains all weights of its model, so there is no adapter. Leave --adapter out."
        )
    if out.exists() and (gguf or not (out.is_dir() and not any(out.iterdir()))):
        raise ConfigError(
            f"{out} exists already{', and is not an empty folder' * (not gguf)}. Choose another path."
        )
    with loading():
        place = hub.locate(identity.source, identity.revision)
        if adapter_only:
            _require_names_of_the_base(place)
        network = _trained(place, identity, files["weights.safetensors"])
    lost = None
    if isinstance(network, PeftModel) and not adapter_only:
        lost = fold(network)
        network = network.unload()
    origin = Origin(
        identity.source,
        place.repository is not None,
        identity.revision,
        identity.lora_rank,
        adapter_only,
        identity.dtype,
        curriculum,
        installed_version(),
        lost,
    )
    figures = figures_of(metrics)
    partial = durable.draft_beside(out)
    try:
        partial.mkdir(parents=True)
        (partial / "README.md").write_text(card(origin, figures), encoding="utf-8")
        if gguf:
            write_gguf(partial / out.name, network, load_tokenizer(place, network), place.source)
        else:
            _write(partial, network, place, adapter_only)
        if ollama is not None:
            (partial / "Modelfile").write_text(_modelfile(network, place, ollama), encoding="utf-8")
        # Apply the usual file mode; safetensors makes its files readable for their owner only.
        mode = (partial / "README.md").stat().st_mode
        for path in partial.iterdir():
            path.chmod(mode)
        durable.name_folder(partial / out.name if gguf else partial, out)
    except (OSError, SafetensorError) as error:
        raise CannotRecord(
            f"{out} cannot be written: {getattr(error, 'strerror', None) or hub.first_line(error)}. Choose"
            " another folder, or free some space."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(out, origin, figures)


def _require_names_of_the_base(place: hub.Place) -> None:
    """Raise ConfigError if the adapter's tensor names do not occur in the base as transformers loads it.

    transformers loads some models with several parts whole, and the language model's tensors then have other
    names. peft would ignore an adapter with the names that training saw.
    """
    whole = read_config_json(place.folder, place.source)
    kinds = (whole.get("model_type"), read_config(place).model_type)
    if has_other_parts(whole) and len({CLASSES.get(kind) for kind in kinds}) > 1:
        raise ConfigError(
            f"{place.source} has further parts (vision or audio), and with these parts the tensors of its"
            " language model have other names: the adapter would have no effect. Leave --adapter out."
        )


def base_network(place: hub.Place, identity: policy_files.ModelIdentity) -> nn.Module:
    """Load the base model of a checkpoint on the CPU, with the weights as training saw them.

    Raises CheckpointUnfit if an adapter was trained on other weights.
    """
    transformers_logging.disable_progress_bar()
    network: nn.Module = load_weights(
        hub.with_weights(place), read_config(place), DTYPES[identity.dtype], place.source
    )
    if identity.lora_rank is not None and fingerprint_of(network) != identity.fingerprint:
        raise policy_files.CheckpointUnfit(
            f"the weights of {place.source} have changed since the adapter was trained. Restore the old"
            " base model: an adapter works only on the weights that it was trained on."
        )
    if identity.dtype == NF4:
        require_nf4(torch.device("cpu"), adapter=True)
        round_to_four_bits(network)
    return network


def put_trained(network: nn.Module, weights: bytes, source: str) -> None:
    """Copy a checkpoint's values into the network's trained parameters. Raises CheckpointUnfit."""
    try:
        policy_files.put_weights({n: p for n, p in network.named_parameters() if p.requires_grad}, weights)
    except ValueError as error:
        raise policy_files.CheckpointUnfit(
            f"the checkpoint does not fit the base model {source}: {hub.first_line(error)}. Restore the model"
            " that the node was started with."
        ) from error


def _trained(place: hub.Place, identity: policy_files.ModelIdentity, weights: bytes) -> nn.Module:
    """Load the base model and the trained weights; returns a peft model if an adapter was trained.

    Raises CheckpointUnfit.
    """
    network = base_network(place, identity)
    if identity.lora_rank is not None:
        config = lora_config(identity.lora_rank, network)
        config.base_model_name_or_path = place.repository or str(place.folder.resolve())
        config.revision = place.revision
        network.name_or_path = config.base_model_name_or_path
        network = in_peft(network, config)
    put_trained(
        network.get_base_model() if isinstance(network, PeftModel) else network, weights, place.source
    )
    return network.eval()


def _modelfile(network: Any, place: hub.Place, config: NodeConfig) -> str:
    chat = chat_of(config.model, place.source, load_tokenizer(place, network), network, plain=True)
    context = context_of(network.config) or MAX_CONTEXT_TOKENS
    return modelfile(chat, config.generate.temperature, work_of(config).new_tokens, context)


def _write(folder: Path, network: Any, place: hub.Place, adapter_only: bool) -> None:
    document = read_config_json(place.folder, place.source)
    # Of a model with several parts only the language model was loaded. Its tensors keep the names that they
    # have without the other parts.
    parts = has_other_parts(document)
    network.save_pretrained(folder, **{} if adapter_only else {"save_original_format": not parts})
    if not adapter_only:
        _add_old_names(folder / "config.json", document["text_config"] if parts else document)
    # Copy the tokenizer's files unchanged: transformers 4 and packages based on it cannot read the files that
    # transformers 5 would write, and llama.cpp needs tokenizer.model, which transformers leaves out.
    for name, path in small_files(place.folder, place.source, TOKENIZER_FILES).items():
        shutil.copyfile(path, folder / name)


# Keys that transformers 4 reads and transformers 5 writes only under other names.
_OLD_NAMES: Final = ("rope_", "partial_rotary_factor", "num_experts")


def _add_old_names(path: Path, base: Mapping[str, Any]) -> None:
    """Add the base model's old key names to a written config.json.

    Without these keys, transformers 4 and packages based on it silently compute with their defaults.
    """
    written = json.loads(path.read_text(encoding="utf-8"))
    old = {name: value for name, value in base.items() if name.startswith(_OLD_NAMES)}
    both = old | {"torch_dtype": written["dtype"]} | written
    path.write_text(json.dumps(both, indent=2) + "\n", encoding="utf-8")
