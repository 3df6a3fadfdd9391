"""Chat templates as real models have them, in this project's own words, and tokenizers to go with them."""

import json
from pathlib import Path

from activities.tokenizing.tokenizer import ModelTokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Trims contents, begins with BOS, puts tools and a date into the system turn, slices the messages.
LLAMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%Y') + '\\n\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n' }}{% endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{% endfor %}
        {{- '<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# As gpt-oss': an answer has channels; the last one ends with <|return|>, earlier ones with <|end|>, which also stands
# between an answer's thoughts and its text, and a call with <|call|>. Only a message's first call is written.
HARMONY = """{%- if messages[0].role in ('developer', 'system') %}
    {%- set told, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set told, rest = '', messages %}
{%- endif %}
{%- if told or tools %}
    {{- '<|start|>developer<|message|>' + told }}
    {%- for tool in tools or [] %}{{- '\\ntype ' + tool.function | tojson }}{% endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in rest %}
    {%- if message.tool_calls %}
        {%- set later = namespace(answers=false) %}
        {%- for other in rest[loop.index:] %}
            {%- if other.role == 'assistant' and not other.tool_calls %}{% set later.answers = true %}{% endif %}
        {%- endfor %}
        {%- set call = message.tool_calls[0].function %}
        {%- set called.name = call.name %}
        {%- if (message.content or message.thinking) and not later.answers %}
            {%- set thought = message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set is_last = loop.last and not add_generation_prompt %}
        {%- if is_last and 'thinking' in message %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if is_last else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

# Cuts thinking out of turns before the last question, wraps the rest in <think>, and hides tool answers in user turns.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '<tools>' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user'
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thinking = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thinking = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thinking) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# No generation prompt; the answer follows a space; alternation is enforced.
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate between user and assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""

BLOCKS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content }}{%- endgeneration %}
        {{- '<|im_end|>' }}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
]
TEMPLATES = {
    "chatml": (CHATML, {"eos_token": "<|im_end|>"}),
    "llama": (LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "qwen": (QWEN, {"eos_token": "<|im_end|>"}),
    "mistral": (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}),
    "blocks": (BLOCKS, {"eos_token": "<|im_end|>"}),
}

CORPUS = [
    "The crane lifts the crate; the crate swings over the quay and down into the hold.",
    "How many sacks are there? There are 12 sacks and 7 barrels, that makes 19.\n\n",
    "Ebbe und Flut wechseln täglich. 船は港に入る。",
    '{"name": "tide", "arguments": {"port": "north"}}',
] * 4


def tokenizer_json(normalizer: object = None, vocab_size: int = 700) -> str:
    """A byte-level BPE tokenizer with special tokens of several families, and <think> and <tool_call> beside them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    return tokenizer.to_str()


def write_model(folder: Path, name: str, normalizer: object = None) -> Path:
    """The small files of a model with one of the templates."""
    template, special = TEMPLATES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(normalizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def open_model(folder: Path) -> ModelTokenizer:
    return ModelTokenizer({path.name: path.read_bytes() for path in folder.iterdir()}, str(folder))
