"""llama.cpp's side of a comparison: its server answers the prompts in this process, one slot a row.

`python benchmarks/peers/llama_cpp.py FOLDER GGUF`. Every completion has the full length. The prompts are the
same token ids as on swarmd's side, and the server caches them between rounds (cache_prompt).
"""

import json
import sys
import threading
import urllib.request
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import xllamacpp

from benchmarks.peers.protocol import serve
from benchmarks.round.meter import Meter


def main() -> None:
    document = json.loads((Path(sys.argv[1]) / "work.json").read_text())
    work, prompts = document["work"], document["prompts"]
    rows = [prompt for prompt in prompts for _ in range(work["completions"])]
    options, longest = xllamacpp.CommonParams(), max(map(len, prompts)) + work["max_new_tokens"]
    options.model.path = sys.argv[2]
    options.n_parallel, options.n_ctx = len(rows), len(rows) * -(-longest // 256) * 256
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.warmup, options.cont_batching = False, True
    options.n_batch, options.n_ubatch, options.n_gpu_layers = 2048, 512, 0
    server = xllamacpp.Server(options)

    def ask(seed: int, found: list[int]) -> None:
        body = {
            "prompt": rows[seed], "n_predict": work["max_new_tokens"], "ignore_eos": True, "seed": seed,
            "temperature": work["temperature"], "samplers": ["temperature"], "cache_prompt": True,
        }  # fmt: skip
        request = urllib.request.Request(
            server.listening_address + "/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=1800) as reply:
            found.append(json.load(reply)["tokens_predicted"])

    def play() -> dict[str, int]:
        found: list[int] = []
        threads = [threading.Thread(target=ask, args=(seed, found)) for seed in range(len(rows))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"tokens": sum(found)}

    serve(play, Meter("cpu"))


if __name__ == "__main__":
    main()
