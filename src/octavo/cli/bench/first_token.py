"""What `octavo bench startup` runs in a fresh process: one token from an LLM with the options in argv[1], as JSON.

Says on stdout, as JSON, at which time.monotonic() each part of that was done, and where the weights came from.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    from octavo import LLM, SamplingParams

    done = {"import": time.monotonic()}
    llm = LLM(**json.loads(sys.argv[1]))
    done["load"] = time.monotonic()
    llm.generate("Hi", SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    done["first token"] = time.monotonic()
    print(json.dumps({"done": done, "loading": llm.info.loading}))


if __name__ == "__main__":
    main()
