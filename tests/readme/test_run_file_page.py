"""docs/run-file.md names every key of a run file, with its default and its own description."""

from pathlib import Path

from headrace.run.reference import keys, main, table, with_table

PAGE = Path(__file__).parents[2] / "docs" / "run-file.md"


def test_the_page_is_current():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, f"run: python -m headrace.run.reference {PAGE}"


def test_every_key_is_explained():
    rows = table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [key for key, _ in keys()]
    assert {"model.path", "optim.lr", "update.bucket", "out"} <= {key for key, _ in keys()}
    assert "predicted" not in table()
    assert not [key for key, field in keys() if not field.description]


def test_an_outdated_page_is_written_anew_and_the_rest_of_it_kept(tmp_path):
    page = with_table(PAGE.read_text(encoding="utf-8"))
    outdated = tmp_path / "page.md"
    outdated.write_text(page.replace("| `optim.lr` |", "| `optim.rate` |"), encoding="utf-8")
    main(outdated)
    assert outdated.read_text(encoding="utf-8") == page
