"""The README.md of a trained model, in the form that the Hugging Face hub reads."""

import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from pspo import __version__
from pspo.cli.files import Settings
from pspo.cli.terminal import one_line
from pspo.config import TrainConfig
from pspo.evaluate.statistics import Record
from pspo.model.find import resolve_adapters
from pspo.run.describe import changed_switches, describe_results
from pspo.tasks.sources import SOURCES

TEMPLATE = """---
{{ card_data }}
---

# {{ name }}, trained with {{ method }}

{{ steps }} optimizer steps of {{ surrogate }} on {{ data }}, seed {{ seed }}, by pspo {{ version }}.

* Settings that differ from its defaults: {{ changed }}
* System prompt: {{ system }}

```text
{{ results }}
```
"""


def model_card(config: TrainConfig, settings: Settings, step: int, summary: Record) -> ModelCard:
    """The model after ``step`` optimizer steps: how it was trained, the run's tests and validations."""
    base = config.model.name_or_path
    is_on_hub = not Path(base).is_dir() and re.fullmatch(r"\w[\w.-]*/[\w.-]+", base) is not None
    method = type(config.algorithm.surrogate).__name__
    sources = [SOURCES[part].hub_id if part in SOURCES else part for part in config.data.name.split("+")]
    card_data = ModelCardData(
        library_name="peft" if resolve_adapters(config.model).has_adapters else "transformers",
        pipeline_tag="text-generation",
        base_model=base if is_on_hub else None,
        datasets=[source for source in sources if "/" in source] or None,
        tags=["pspo", "reinforcement-learning", method.lower()],
    )
    return ModelCard.from_template(
        card_data,
        template_str=TEMPLATE,
        name=one_line(Path(base).name),
        method=method,
        steps=f"{step:,}",
        surrogate=code_span(str(config.algorithm.surrogate)),
        data=code_span(config.data.name),
        seed=config.run.seed,
        version=__version__,
        changed=code_span(", ".join(changed_switches(config.model, settings)) or "none"),
        system=code_span(config.data.system_text or "none"),
        results=describe_results(summary) or "no tests",
    )


def code_span(text: str) -> str:
    """Text as Markdown shows it unchanged."""
    return f"`{one_line(text).replace('`', chr(39))}`"
