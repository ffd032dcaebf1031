"""Fill-in-the-middle: prompts of the texts before and after an answer, by tokens of the model."""

from server.constraints import FieldError
from server.tokenizing import TokenizerPool, vocabulary_of
from tokenizer import Tokenizer

# Names of the tokens before the first text, before the second one, and before the answer, as the
# models' cards have them. The text after the answer comes second.
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek)
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral, which has no token before the answer


def fill_in_prompt(before: str, after: str, tokenizer: Tokenizer | TokenizerPool) -> list[int]:
    """Return the ids of a prompt whose answer stands between two texts.

    Names of control tokens in the texts are text. Raises FieldError if the model has no such form.
    """
    vocabulary = vocabulary_of(tokenizer)
    for form in (*FORMS, SUFFIX_FIRST):
        found = [id for name in form if (id := vocabulary.token_id(name)) is not None]
        if len(found) == len(form):
            break
    else:
        reason = "this model has no tokens for fill-in-the-middle"
        raise FieldError(f"suffix: {reason}; leave it out", "suffix")
    texts = (after, before) if form is SUFFIX_FIRST else (before, after)
    first, second = (tokenizer.encode(text, bos=False) for text in texts)
    return [*vocabulary.encode(""), found[0], *first, found[1], *second, *found[2:]]
