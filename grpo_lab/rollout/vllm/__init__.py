"""The vLLM sampler. `engine` is what the loop talks to; where vLLM runs is a host's business (`host`): in this process
(`local`), in a worker of the run's own (`worker`), or as a server (`server`). vLLM itself is imported only in `local`,
`transfer` and its own processes."""
