from gateway.simulator.command import simulate_vllm

simulate_vllm()
