"""Weight sync: a trainer's weights, as a numbered version, travel to samplers while training continues.

Weights travel in buckets of bytes (buckets.py). A bucket holds rows of tensors under their Hugging Face or PEFT names,
and a checksum. The trainer's rank 0 fills two buffers in turn (sender.py), so that it fills one while the samplers read
the other (bucket_reader.py). A connection to each sampler says what is in them (connections.py); how their
contents get there is up to a transport (transports/). With `delta`, only the elements that differ from the receiver's
version travel (buckets.py).

Nothing here is durable: the store holds every version, and a sampler that misses one loads it from there.
"""
