"""Three environments of tools-6 without their tools: the first text must be the answer.

swarmd task show calculator.1 7 --curriculum docs/examples/without_tool.py
"""

from swarmd.tasks import tools

name = "without-tool"
version = "1"
specialties = [each for each in tools.specialties if each.startswith(("calculator", "units", "facts"))]
examples = [
    ("What is 7+8*2? End with <answer>…</answer>.", "<answer>23</answer>"),
    ("In which city does Zoe live? End with <answer>…</answer>.", "<answer>Bern</answer>"),
]


def generate(specialty, seed):
    question, episode = tools.reset(specialty, seed)
    asked, _, _ = question.partition(" A call such as ")
    return f"{asked} End with <answer>…</answer>.", episode.answer


def score(right, answer):
    return float(answer.strip().lower() == right.lower())


def solution(right):
    return right
