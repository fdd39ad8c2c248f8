"""Renders a RayJob manifest from a profile and settings, without a cluster.

    yaml_files.py       reads YAML files, and writes YAML that is the same on every machine
    profile.py          loads a profile and the profiles that it extends (load_profile)
    render.py           collects the settings and calls the modules below (render)
    shape.py            chooses the number of pods and each worker's resources (choose_shape)
    pods.py             fills in the head pod and the worker groups of the template k8s/rayjob.yaml (make_cluster)
    merge.py            merges in the profile's own Kubernetes fields at the end (merge_pod, merge_job)

These modules check the manifest before it is sent to the cluster:

    absent_code.py      finds code and files that the pods would lack (find_absent)
    foreign_storage.py  finds storage that the pods have no credentials for (find_foreign_storage)
    requirements.py     lists the pods that a run needs and their requests (pod_sets)
    quotas.py           checks that a namespace admits these pods (check_quotas, check_limit_ranges)
    gpu_nodes.py        finds pods that would share a node's GPUs (find_split_nodes)
"""
