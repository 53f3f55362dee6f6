"""What a model is told when it writes a text anew: the styles, and the words around a piece. No torch here.

A style changes how things are said, never what is said; several styles of one document show the same facts from
different sides. Source of the recipe: Kimi K2's report, section on rephrasing (style- and perspective-diverse prompts,
chunk-wise autoregressive rewriting, a check of fidelity); the wording is ours.
"""

from __future__ import annotations

STYLES = {
    "textbook": "as a chapter of a textbook that builds from simple to difficult and defines each term when it comes",
    "encyclopedia": "as an article of an encyclopedia: neutral, dense, ordered by topic",
    "dialogue": "as a conversation between a curious student, who asks, and a teacher, who answers in full",
    "lecture": "as notes of a lecture, spoken by an expert to beginners, with the reasons for each step",
    "questions": "as questions, each followed by its complete answer, so that together they cover everything",
    "plain": "in plain, short sentences for a reader without any knowledge of the subject",
    "derivation": "step by step, so that each claim, formula or number follows visibly from those before it",
    "practitioner": "from the view of somebody who uses this every day and explains it to a new colleague",
}

SYSTEM = (
    "You rewrite documents. Keep every fact, number, name, formula and piece of code of the original. Add nothing that "
    "the original does not say, and leave nothing out. Write in the language of the original. Answer with the "
    "rewritten text alone."
)
JUDGE_SYSTEM = (
    "You compare a rewritten passage with its original. Answer with one word: SAME if it states the same facts without "
    "any contradiction, addition or omission that matters, DIFFERENT if not."
)


def rewriting(style: str, written: str, piece: str, *, first: bool, last: bool) -> str:
    """The request for one piece: the style, what was written last, the piece."""
    where = "It is the whole document." if first and last else _PLACES[(first, last)]
    before = f"\n\nThe end of what you have written so far:\n<written>\n{written}\n</written>" if written else ""
    follow = " Go on from there without repeating it." if written else ""
    return (
        f"Rewrite the passage below {STYLES[style]}. {where}{follow}{before}\n\n"
        f"The passage:\n<passage>\n{piece}\n</passage>"
    )


_PLACES = {
    (True, False): "It is the beginning of a longer document; more follows.",
    (False, False): "It is from the middle of a longer document; more follows.",
    (False, True): "It is the end of a longer document.",
}


def judging(original: str, rewritten: str) -> str:
    """The request to compare."""
    return f"<original>\n{original}\n</original>\n\n<rewritten>\n{rewritten}\n</rewritten>"
