"""Shows whether a node could measure its gain from the swarm, by leaving out external text in some rounds.

    python -m benchmarks.lab.own_gain

Simulated histories of one node. Its reward follows the learning curve of docs/experiments.md ("2,000
rounds"), on which a round without external text advances only 1 / (1 + gain) as far. A round's reward is the
mean over 32 completions and has a standard deviation of 0.17 (tiny-latent). Two estimators of the reward lost
in such a round are compared. Each is the best linear estimator under its assumption, and is read once, at the
end. An estimator that may be read daily says "gain" less often.

    curve known     the node knows its learning curve with external text in all rounds; no real node does
    curve smooth    it knows only that the curve is a polynomial of degree 8; the rest is paired in time
"""

import numpy as np

ROUNDS, HISTORIES, REWARD_SD, PLATEAU, SCALE_ROUNDS = 2000, 1000, 0.17, 0.66, 330.0
ONE_SIDED_5_PERCENT = 1.645


def says_gain(gain: float, share: float, block: int, *, known: bool, seed: int) -> tuple[bool, float]:
    """Play one history: return whether the estimator says "gain", and the share of reward that it cost."""
    rng = np.random.default_rng(seed)
    blocks = ROUNDS // block
    off = np.zeros(blocks, bool)
    off[rng.choice(blocks, max(1, round(share * blocks)), replace=False)] = True
    off = np.repeat(off, block)
    time, behind = np.arange(ROUNDS), np.cumsum(off) - off
    curve = PLATEAU * (1 - np.exp(-time / SCALE_ROUNDS))
    lost = gain / (1 + gain)
    expected = PLATEAU * (1 - np.exp(-(time - lost * behind) / SCALE_ROUNDS))
    reward = expected + rng.normal(0, REWARD_SD, ROUNDS)
    # The reward that each round would lose if nothing had been learnt in the earlier rounds without external
    # text.
    signal = PLATEAU / SCALE_ROUNDS * np.exp(-time / SCALE_ROUNDS) * behind
    if known:
        reward = curve - reward
    else:
        smooth = np.linalg.qr(np.vander(np.linspace(-1, 1, ROUNDS), 9))[0]
        signal, reward = signal - smooth @ (smooth.T @ signal), -(reward - smooth @ (smooth.T @ reward))
    z = signal @ reward / (REWARD_SD * np.linalg.norm(signal))
    return bool(z > ONE_SIDED_5_PERCENT), float(1 - expected.sum() / curve.sum())


def main() -> None:
    print('| rounds without | in blocks of | cost in reward | curve | "gain" at 0 % | at +30 % | at +100 % |')
    print("|---|---|---|---|---|---|---|")
    for share, block in ((0.02, 1), (0.02, 40), (0.1, 1), (0.1, 20), (0.25, 20), (0.5, 20), (0.5, 100)):
        for known in (True, False):
            found = {
                gain: [says_gain(gain, share, block, known=known, seed=seed) for seed in range(HISTORIES)]
                for gain in (0.0, 0.3, 1.0)
            }
            said = " | ".join(f"{np.mean([gains for gains, _ in each]):.0%}" for each in found.values())
            cost = np.mean([cost for _, cost in found[0.3]])
            print(f"| {share:.0%} | {block} | {cost:.1%} | {'known' if known else 'smooth'} | {said} |")


if __name__ == "__main__":
    main()
