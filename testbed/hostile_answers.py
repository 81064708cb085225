"""Answers that try to do harm.

None of them is right, and none may have an effect. The payloads write to a folder and connect to a port;
tests watch both.
"""

import random
from collections.abc import Iterator

from swarmd.tasks.scoring.grading import solution
from swarmd.tasks.source import CurriculumTasks, Task

CODE = (
    "__import__('os').system('touch {path}')",
    "__import__('pathlib').Path('{path}').write_text('x')",
    "[open('{path}', 'w').write('x')]",
    "__import__('os').posix_spawn('/usr/bin/touch', ['touch', '{path}'], {{}})",
    "__import__('os').fork() or __import__('os').mkdir('{path}')",
    "__import__('socket').create_connection(('127.0.0.1', {port}))",
    "__import__('subprocess').run(['touch', '{path}'])",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', '{path}'])",
    "__import__('ctypes').CDLL(None).mkdir(b'{path}', 511)",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "exec('import os; os.mkdir(\"{path}\")')",
    "exit(3)",
    "__import__('os')._exit(0)",
    "__import__('os').write(1, b'\\xff' * 99)",
    "[__import__('os').write(f, b'\\0' * 9) for f in range(3, 9)]",
    "__import__('sys').setrecursionlimit(10**9)",
    "$(touch {path})",
    "`touch {path}`; touch {path}",
    "{{0.__class__.__init__.__globals__}}",
    "cos\nsystem\n(S'touch {path}'\ntR.",
    "../../../../{path}",
)
SLOW = (
    "9**9**9**9",
    "10**10**8 % 7",
    "sum(range(10**12))",
    "[0]*10**11",
    "'a'*10**10",
    "∨".join("abcdefghijklmnopqrstuvwxyz"),
    "→".join("abcdefghijklmnopqrstuvwxyz"),
    "P∨" * 120 + "junk",
    "1e999999999",
    "-1E-999999999",
    "1/1e999999",
)
DEEP = (
    "(" * 3000 + "P" + ")" * 3000,
    "[" * 100 + "]" * 100,
    "¬" * 3000 + "P",
    "{" * 5000,
    "(" * 120 + "P" + ")" * 120,
    "(P∧" * 80,
)
HUGE = (
    "a" * 1_000_000,
    "9" * 200_000,
    "9" * 5000 + "/1",
    "\\frac{" + " " * 20_000 + "x",
    "0 " * 500_000,
    " \n" * 300_000,
)
NUMBERS = (
    "NaN",
    "sNaN",
    "Infinity",
    "-inf",
    "1_0_0_0_",
    "0x10",
    "None",
    "True",
    "null",
    "[]",
    "{}",
    "''",
    "0/0",
    "--1",
    "1e",
    ".",
    "-",
)
CONTROL = tuple("\0\x07\x1b\u202e\u2066\u200b\ufeff\ud800\udc00\x7f\x9b\u2028\t\r\U000e0041")
FLOODS = ("<answer>", "</answer>", "<answer>\n", "<answer></answer", "<answer>x", "<answer><answer></answer>")


def wide(text: str) -> str:
    """Return the text in full-width characters, whose digits int() and Decimal() accept."""
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text) if text.strip() else "５"


def answers(tasks: CurriculumTasks, task: Task, path: str, port: int, rng: random.Random) -> Iterator[str]:
    """Yield one completion of each kind, over and over."""
    right = solution(tasks, task)
    while True:
        yield _tagged(rng.choice(CODE).format(path=path, port=port))
        yield _tagged(rng.choice(SLOW))
        yield _tagged(rng.choice(DEEP))
        yield _tagged(rng.choice(HUGE))
        yield _tagged(rng.choice(NUMBERS))
        yield _tagged(wide(right))
        i = rng.randrange(len(right) + 1)
        yield _tagged("." + right[:i] + rng.choice(CONTROL) + right[i:] + ".")
        yield rng.choice(FLOODS) * rng.choice((500, 5000, 50_000))
        yield rng.choice(FLOODS) * 5000 + f"<answer>{rng.choice(NUMBERS)} or {right}</answer>"
        yield _tagged(
            "".join(
                chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x110000))))
                for _ in range(rng.randrange(5, 300))
            )
        )
        yield f"<answer>{right}" + rng.choice(CONTROL)  # the tag is never closed


def _tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"
