"""Use a server with LangChain: python langchain_client.py [URL]

Install it with `pip install langchain-openai`, and start the server with `quantkit serve MODEL
--name int4`. If the server has a key, set OPENAI_API_KEY to it.
"""

import os
import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1",
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    model="int4",
    max_tokens=60,
    temperature=0,
)
prompt = ChatPromptTemplate(
    [("system", "You answer in one sentence."), ("user", "What is the capital of {country}?")]
)
chain = prompt | model | StrOutputParser()

print(chain.invoke({"country": "France"}))
print(chain.batch([{"country": "Italy"}, {"country": "Spain"}]))
for piece in chain.stream({"country": "Japan"}):
    print(piece, end="", flush=True)
print()
