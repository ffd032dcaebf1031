"""The heat map as an instrument: kinds of tokens, comparisons, files."""

import csv
import io
import json
from xml.etree import ElementTree

import pytest
from scripted_page import content

from scripts.capture_page import wait_until

pytest_plugins = ("scripted_page",)
TEXT = "one two 34 , word ) 5 two"
OTHER = "red green blue red red (1)"


def shares(experts: list, layers: int, count: int) -> list[list[float]]:
    """Return the share of tokens that chose each expert. experts: [T][L][A]."""
    return [
        [sum(expert in token[layer] for token in experts) / len(experts) for expert in range(count)]
        for layer in range(layers)
    ]


def distance(a: list, b: list, active: int) -> list[float]:
    return [
        sum(abs(x - y) for x, y in zip(one, two, strict=True)) / 2 / active
        for one, two in zip(a, b, strict=True)
    ]


def saved(page, button: str) -> str:
    """Return the text of the file that a button saves."""
    page.catch_downloads()
    page.click(f"#{button}")
    wait_until(lambda: len(page.downloads()) == 1)
    return page.downloads()[0][1]


def test_kinds_of_tokens_are_counted(page, serve):
    server = serve({"x": [{"reasoning_content": "so so"}, {"content": TEXT}]})
    page.open(server)
    page.click("#open_experts")
    page.ask("x")
    tokens = {"word": 6, "part": 0, "number": 2, "mark": 2, "space": 2, "reasoning": 2}
    for kind, count in {"all": 12, **tokens, "answer": 10}.items():
        page.choose("#kind", kind)
        assert f" {count} tokens" in page.text("#experts_scope"), kind
    assert page.run("return document.getElementById('pattern_field').hidden")
    page.choose("#kind", "text")
    page.choose("#pattern", "wo")
    assert '3 tokens: with "wo"' in page.text("#experts_scope")
    texts = [" two", " word", " two"]
    rows = list(csv.DictReader(io.StringIO(saved(page, "save_csv"))))
    expected = shares(server.routing(texts)["experts"], 4, 8)
    for row in rows:
        share = expected[int(row["layer"])][int(row["expert"])]
        assert float(row["share"]) == pytest.approx(share, abs=1e-6)
        assert int(row["tokens"]) == round(3 * share)
    page.choose("#kind", "part")
    assert page.text("#readout").startswith("The answer has no such tokens.")


def test_kinds_of_the_tokens_of_code(page, serve):
    page.open(serve())
    kinds = page.run_async(
        """const {kindOf} = await import('/page/kinds.js');
        const tokens = arguments[0];
        return tokens.map((token, n) => kindOf(token, tokens[n - 1] ?? ''))""",
        [
            "def",
            " read",
            "_lines",
            "(",
            "path",
            "):",
            "\n",
            "    ",
            "x1",
            " =",
            " 3",
            "\u00e9",
            "\u20ac",
        ],
    )
    assert kinds == [
        *("word", "word", "part", "mark", "word", "mark", "space", "space"),
        *("word", "mark", "number", "part", "mark"),
    ]


def test_two_answers_are_compared(page, serve):
    server = serve({"x": content(TEXT), "y": content(OTHER)})
    page.open(server)
    page.click("#open_experts")
    page.ask("x")
    page.ask("y")
    page.choose("#compare", "0")
    assert page.text("#compare option:checked") == "answer 1"
    rows = list(csv.DictReader(io.StringIO(saved(page, "save_csv"))))
    tokens = [["one", " two", " 34", " ", ",", " word", " ", ")", " 5", " two"]]
    tokens.append(["red", " green", " blue", " red", " red", " ", "(", "1", ")"])
    other, mine = (shares(server.routing(texts)["experts"], 4, 8) for texts in tokens)
    for row in rows:
        place = int(row["layer"]), int(row["expert"])
        a, b = (values[place[0]][place[1]] for values in (mine, other))
        assert float(row["share"]) == pytest.approx(a, abs=1e-6)
        assert float(row["share_other"]) == pytest.approx(b, abs=1e-6)
        assert float(row["difference"]) == pytest.approx(a - b, abs=2e-6)
    found = distance(mine, other, 2)
    readout = page.text("#readout")
    assert f"Mean distance of the layers: {sum(found) / 4:.2f}" in readout
    assert f"Farthest: layer {found.index(max(found))}, {max(found):.2f}" in readout
    assert "Random halves of their tokens have 0." in readout
    assert page.text("#scale_least").startswith("\u2212") and "points" in page.text("#scale_most")
    page.run("document.getElementById('heat').focus()")
    page.press("\ue015")  # down
    assert page.text("#readout").startswith("Layer 0, expert 0: ")
    assert f"Distance of the layer: {found[0]:.2f}" in page.text("#readout")
    page.choose("#compare", "")
    assert "even load" in page.text("#experts_scope").lower()


def test_all_answers_of_a_chat_are_counted_together(page, serve):
    server = serve({"x": content(TEXT), "y": content(OTHER)})
    page.open(server)
    page.click("#open_experts")
    page.ask("x")
    page.ask("y")
    page.click("#whole")
    assert "19 tokens, of 2 answers" in page.text("#experts_scope")
    tokens = ["one", " two", " 34", " ", ",", " word", " ", ")", " 5", " two"]
    tokens += ["red", " green", " blue", " red", " red", " ", "(", "1", ")"]
    expected = shares(server.routing(tokens)["experts"], 4, 8)
    for row in csv.DictReader(io.StringIO(saved(page, "save_csv"))):
        share = expected[int(row["layer"])][int(row["expert"])]
        assert float(row["share"]) == pytest.approx(share, abs=1e-6)
    page.choose("#kind", "number")
    assert "3 tokens: numbers, of 2 answers" in page.text("#experts_scope")


def test_the_same_answer_differs_by_nothing(page, serve):
    server = serve({"x": content(TEXT * 4)})
    page.open(server)
    page.click("#open_experts")
    page.ask("x")
    page.click(".assistant .tools button", "Regenerate")
    page.wait_for_the_end()
    page.choose("#compare", "0")
    assert page.text("#compare option:checked") == "answer 1, version 1"
    assert "Mean distance of the layers: 0.00" in page.text("#readout")


@pytest.mark.parametrize("shape", ((4, 8, 2), (48, 128, 8)))
def test_the_map_is_saved_as_svg(page, serve, shape):
    layers, experts, active = shape
    page.open(serve({"x": content(TEXT)}, layers=layers, experts=experts, active=active))
    page.click("#open_experts")
    page.ask("x")
    root = ElementTree.fromstring(saved(page, "save_svg"))
    name = "{http://www.w3.org/2000/svg}"
    cells = root.findall(f".//{name}g/{name}rect")
    assert len(cells) >= layers * (max(experts - 8, 1) + 1)
    titles = [cell.find(f"{name}title").text for cell in cells]
    assert titles[0].startswith("layer 0, expert 0: ") and titles[-1].startswith(
        f"layer {layers - 1}: spread"
    )
    texts = [text.text for text in root.iter(f"{name}text")]
    assert texts[:2] == ["Scripted-MoE, int4", "10 tokens"] and "spread" in texts
    width, height = float(root.get("width")), float(root.get("height"))
    assert all(0 <= float(cell.get("x")) < width for cell in cells)
    assert all(float(cell.get("y")) + float(cell.get("height")) < height for cell in cells)


def test_a_recorded_file_is_opened_kept_and_compared(page, serve):
    server = serve({"x": content(TEXT)})
    page.open(server)
    page.click("#open_experts")
    page.ask("x")
    recording = json.loads(saved(page, "save_routing"))
    (answer,) = recording["answers"]
    assert answer["prompt"] == "x" and "".join(answer["tokens"]) == TEXT
    routed = server.routing(answer["tokens"])
    for token, (experts, weights) in enumerate(
        zip(routed["experts"], routed["weights"], strict=True)
    ):
        for layer, (row, values) in enumerate(zip(experts, weights, strict=True)):
            by_weight = dict(sorted(zip(row, values, strict=True), key=lambda pair: -pair[1]))
            assert answer["experts"][token][layer] == list(by_weight)
            assert answer["weights"][token][layer] == pytest.approx(list(by_weight.values()))
    tokens = ["alpha", " beta"]
    recording["answers"] = [{"prompt": "greek", "tokens": tokens} | server.routing(tokens)]
    page.reload(server)
    page.give_file("#pick_routing", "greek.json", json.dumps(recording))
    wait_until(lambda: page.texts(".answer") == ["alpha beta"])
    assert page.texts(".chat-title") == ["greek.json", "x"] and page.texts(".said") == ["greek"]
    page.colors()
    assert page.count(".answer .token") == 2 and "2 tokens" in page.text("#experts_scope")
    page.reload(server, page.run("return location.hash"))
    wait_until(lambda: page.count(".answer .token") == 2)
    page.click(".chat-title", "x")
    wait_until(lambda: page.count(".answer .token") == 10)
    page.run("HTMLInputElement.prototype.click = () => {}")  # a file dialog
    page.choose("#compare", "file")
    page.give_file("#pick_routing", "greek.json", json.dumps(recording))
    wait_until(lambda: page.text("#compare option:checked") == "greek.json")
    assert "Mean distance of the layers: 0." in page.text("#readout")


GOOD = {"tokens": ["a"], "experts": [[[1, 0]]], "weights": [[[0.5, 0.5]]]}


DAMAGED = (
    ({"tokens": []}, "not as many experts"),
    ({"tokens": None}, "not as many experts"),
    ({"experts": [[[1, 0]], [[1, 0]]]}, "not as many experts"),
    ({"tokens": [5]}, "Token 0"),
    ({"experts": [[[1.5, 0]]]}, "Token 0"),
    ({"experts": [[[70000, 0]]]}, "Token 0"),
    ({"weights": [[[0.5]]]}, "Token 0"),
    ({"weights": [[[None, 1]]]}, "Token 0"),
    ({"experts": [[[]]], "weights": [[[]]]}, "Token 0"),
    (
        {"tokens": ["a", "b"], "experts": [[[1, 0]], [[1]]], "weights": [[[1, 1]], [[1]]]},
        "Token 1",
    ),
)


def test_files_without_routing_are_refused(page, serve):
    page.open(serve())
    cases = [("{", "is not JSON"), ("[]", "has no routing"), ("null", "has no routing")]
    cases.append(('{"moe_fast_routing": 2, "answers": [1]}', "has no routing of version 1"))
    for change, message in DAMAGED:
        value = {"moe_fast_routing": 1, "answers": [GOOD | change]}
        cases.append((json.dumps(value), message))
    for text, message in cases:
        page.run("document.getElementById('toast').replaceChildren()")
        page.give_file("#pick_routing", "x.json", text)
        wait_until(lambda said=message: said in page.text("#toast"))
        assert page.count(".message") == 0, text
