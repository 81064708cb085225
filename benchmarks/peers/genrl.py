"""GenRL's side of a comparison: its own GRPO trainer and game manager, unchanged.

They run from GenRL's published package in a separate environment.

`python benchmarks/peers/genrl.py FOLDER [--defaults]`. The settings are the cheapest that do the same work as
swarmd: one update on all completions, gradient checkpointing off, no tracker; on CUDA in bfloat16. --defaults
keeps GenRL's defaults: checkpointing on and minibatches of 2, which makes 32 optimizer steps a round. Only
the trainer's `generate` and `train` are measured, not the game's bookkeeping, and no rollout is exchanged.

The package is installed without its dependencies; benchmarks/round/compare.py names the packages that the
trainer imports. The other dependencies serve GenRL's network and blockchain, so hivemind is not installed.
This file adds only the parts that GenRL leaves to its users: the source of the questions, and the rewards
(random, as on the other sides of the comparison).

GenRL decodes the completions and encodes the text again before training, so the end-of-sequence token is
lost, and a completion's length may change a little.
"""

import json
import random
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
# Otherwise `import genrl` would import this file.
sys.path = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
sys.path.append(str(Path(__file__).parents[2]))

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from genrl.communication.local.null_comm import NullCommunicationBackend  # noqa: E402
from genrl.data import LocalMemoryTextDataManager  # noqa: E402
from genrl.game import BaseGameManager  # noqa: E402
from genrl.rewards import DefaultRewardManager, RewardFnStore, RoundRewardFnStore  # noqa: E402
from genrl.state import GameState  # noqa: E402
from genrl.trainer.grpo_trainer import GRPOLanguageTrainerModule, GRPOTrainerConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from benchmarks.peers.protocol import serve  # noqa: E402
from benchmarks.round.meter import Meter  # noqa: E402

ROUNDS = 10_000  # the driver ends the process long before that


class Questions(LocalMemoryTextDataManager):
    """The same questions each round, in the form of GenRL's own manager for ReasoningGYM.

    There are no rollouts of other nodes.
    """

    def __init__(self, system, questions):
        self.system, self.questions = system, questions
        super().__init__(None, batch_item_id_column="question", data_generator=self.round_of)

    def round_of(self, **_):
        return datasets.Dataset.from_dict({"question": self.questions})

    def flatten_states(self, flattened, state, _stage):
        flattened.setdefault("system_prompt", []).append(self.system)
        flattened.setdefault("user_prompt", []).append(state.environment_states["question"])
        return flattened

    def prepare_states(self, current_state, _swarm_states):
        return current_state.get_latest_state()

    def prepare_environment(self, *_):
        """Do nothing. This method and the next two serve a second stage, and a round has only one."""

    prepare_opponent = prepare_personal = prepare_environment


def main() -> None:
    folder = Path(sys.argv[1])
    document = json.loads((folder / "work.json").read_text())
    work, questions = document["work"], document["questions"]
    if work["device"] == "cpu" and torch.backends.mps.is_available():
        raise SystemExit("GenRL takes Apple's MPS if there is one: no comparison on this CPU.")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    cuda, meter = work["device"] == "cuda", Meter(work["device"])
    figures, defaults = {}, "--defaults" in sys.argv

    class Timed(GRPOLanguageTrainerModule):
        """The trainer, with its time measured; nothing else is changed."""

        def generate(self, inputs, *_, **__):
            begun = meter.now()
            answers, ids = super().generate(inputs, return_completion_ids=True)
            figures["generate"] = meter.now() - begun
            figures["tokens"] = sum(
                length(row.tolist(), self.processing_class.eos_token_id) for rows in ids for row in rows
            )
            return answers

        def train(self, *arguments):
            begun = meter.now()
            super().train(*arguments)
            figures["seconds"] = figures["generate"] + meter.now() - begun

    config = GRPOTrainerConfig(
        max_new_tokens=work["max_new_tokens"],
        num_generations=work["completions"],
        minibatch_size=GRPOTrainerConfig.minibatch_size if defaults else len(questions) * work["completions"],
        enable_gradient_checkpointing=defaults,
        learning_rate=work["learning_rate"],
        temperature=work["temperature"],
        # GenRL's default, None, becomes transformers' 50, which samples other tokens, and so other lengths.
        top_k=0,
        dtype="bfloat16" if cuda else "float32",
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if cuda else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    trainer = Timed(
        [model], config, processing_class=tokenizer, log_dir=str(folder / "genrl"), log_with="none"
    )
    rng = random.Random(0)

    def rewards(state):
        """[agent][question][node][completion]"""
        actions = state.get_stage_actions(0)
        return {
            agent: {
                key: [[float(rng.random() < 0.5) for _ in node] for node in nodes]
                for key, nodes in by_question.items()
            }
            for agent, by_question in actions.items()
        }

    data = Questions(document["system"], questions)
    store = RewardFnStore(ROUNDS, [RoundRewardFnStore(1, [rewards])])
    game = BaseGameManager(
        1,
        ROUNDS,
        GameState(0, 0),
        DefaultRewardManager(store),
        trainer,
        data,
        communication=NullCommunicationBackend(),
        run_mode="train",
    )
    # The same steps that run_game takes before its first round.
    pruners, brancher = game.aggregate_game_state_methods()
    game.state._init_game(
        data.get_round_data(),
        agent_keys=game.agent_ids,
        world_state_pruners=pruners,
        game_tree_brancher=brancher,
    )

    def play():
        figures.clear()
        trained = trainer.global_step
        game.run_game_round()
        if trainer.global_step != trained + 1:  # the game manager swallows exceptions of `train`
            raise SystemExit("GenRL's training failed, and its game went on without it.")
        return figures

    serve(play, meter)


def length(ids, end):
    """Return the number of generated tokens: up to the first end-of-sequence token, without the padding."""
    return ids.index(end) + 1 if end in ids else len(ids)


if __name__ == "__main__":
    main()
