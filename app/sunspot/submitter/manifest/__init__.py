"""Makes the manifest of a RayJob from a profile and settings, without a cluster.

    yaml_files.py       reads YAML, and writes the same bytes on every machine
    profile.py          load_profile: a profile, merged over those that it extends
    render.py           render(JobRequest) -> Rendered: collects the settings, and calls the modules below
    shape.py            choose_shape: how many pods, and what each worker gets
    pods.py             make_cluster: the head and the groups of worker pods
    merge.py            merge_pod, merge_job: the profile's own Kubernetes fields, merged in last

Before a job is sent, these modules examine the manifest:

    absent_code.py      find_absent: code and files that pods would lack
    foreign_storage.py  find_foreign_storage: storage that pods have no credentials for
    requirements.py     pod_sets: the pods that a run needs, and their requests
    quotas.py           check_quotas, check_limit_ranges: whether a namespace admits these pods
    gpu_nodes.py        find_split_nodes: pods that would share the GPUs of a node
"""
