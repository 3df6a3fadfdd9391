{{- /* GPU hosts of the service's shape that there may be at a time; 1 where no policy lets them reach each other. */}}
{{- define "longshore.maxHosts" -}}
{{- $v := .Values -}}{{- $sum := 0 -}}
{{- range $v.hosts }}{{- if and (eq .role "gpu") (eq (.shape | default $v.shape) $v.shape) }}
{{- $sum = add $sum (int (ternary .max .replicas $v.keda.enabled)) }}
{{- end }}{{- end }}
{{- if and $v.network.enabled (not $v.network.gangs) }}{{- $sum = 1 }}{{- end }}
{{- max 1 $sum -}}
{{- end }}
{{- /* The hosts of a role, one set a shape: jobs that KEDA starts while leases wait, or a Deployment. root; role. */}}
{{- define "longshore.hosts" -}}
{{- $root := .root -}}{{- $role := .role -}}{{- $v := $root.Values -}}
{{- range $host := $v.hosts }}
{{- if not (has $host.role (list "gpu" "sampler")) }}{{ fail (printf "hosts: role %q: gpu or sampler" $host.role) }}{{ end }}
{{- if eq $host.role $role }}
{{- $shape := $host.shape | default $v.shape -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?$" $shape) }}{{ fail (printf "hosts: shape %q: lower case letters, digits and dashes" $shape) }}{{ end }}
{{- $label := printf "%s-%s-host" $root.Release.Name $role -}}
{{- $app := ternary $label (printf "%s-%s" $label $shape) (eq $shape $v.shape) -}}
{{- $of := dict "root" $root "role" $role "host" $host "own" $host "app" $app "label" $label "shape" $shape "replicas" $host.replicas }}
---
{{- if not $v.keda.enabled }}
{{ include "longshore.deployment" $of }}
---
{{ include "longshore.budget" $of }}
{{- else }}
{{- if lt (int $host.max) 1 }}{{ fail (printf "hosts: %s of %s: max is 1 at least" $role $shape) }}{{ end }}
apiVersion: keda.sh/v1alpha1
kind: ScaledJob
metadata:
  name: {{ $app }}
  {{- with $v.kueue.queue }}
  labels: {kueue.x-k8s.io/queue-name: {{ . }}}
  {{- end }}
spec:
  pollingInterval: {{ $v.keda.pollingInterval }}
  minReplicaCount: {{ $host.min | default 0 }}
  maxReplicaCount: {{ $host.max }}
  successfulJobsHistoryLimit: 3
  failedJobsHistoryLimit: 10
  # A change of this file ends no job: existing hosts exit when they have been idle.
  rollout: {strategy: gradual}
  # A lease in progress is in no backlog: `accurate` starts a job for each waiting task, however many hosts are busy,
  # and subtracts only jobs whose host has had no lease yet. `default` would subtract all running jobs, and start none.
  scalingStrategy:
    strategy: accurate
    pendingPodConditions: [Ready]
  jobTargetRef:
    parallelism: 1
    completions: 1
    backoffLimit: 0
    template:
      metadata:
        labels: {app: {{ $label }}, shape: {{ $shape }}}
        annotations:  # no node is drained of a busy host: it leaves by itself
          cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
          karpenter.sh/do-not-disrupt: "true"
      spec:
        restartPolicy: Never
        {{- include "longshore.pod" $of | nindent 8 }}
  triggers:
    - type: temporal
      metadata:
        endpoint: {{ $v.temporal.address }}
        namespace: {{ $v.temporal.namespace }}
        taskQueue: {{ $role }}-{{ $shape }}
        queueTypes: activity,workflow
        targetQueueSize: "1"
        activationTargetQueueSize: "0"
      {{- if or $v.temporal.apiKeySecret $v.temporal.tlsSecret }}
      authenticationRef: {name: {{ $root.Release.Name }}-temporal}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
