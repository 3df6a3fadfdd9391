{{- /* The pod of a process. root; role: service, control, gpu or sampler; host: of a GPU or sampler host, its values. */}}
{{- define "longshore.pod" -}}
{{- $root := .root -}}{{- $v := $root.Values -}}{{- $host := .host | default dict -}}
{{- $leases := has .role (list "gpu" "sampler") -}}
{{- $own := .own -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $v.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with $own.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- if ne .role "service" }}
terminationGracePeriodSeconds: {{ add 60 ($host.drainSeconds | default 0) }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: {{ toJson ($own.seccompProfile | default (dict "type" "RuntimeDefault")) }}
containers:
  - name: {{ ternary "service" "host" (eq .role "service") }}
    image: {{ ternary $v.image.worker $v.image.service $leases }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    {{- if eq .role "service" }}
    command: [python, -m, service.app, --host, 0.0.0.0, --port, {{ $v.service.port | quote }}]
    {{- else }}
    {{- /* What the Worker Controller sets can be seen here, and not in variables of our own, which come before. */}}
    {{- $build := and (eq .role "control") $v.control.workerController.enabled }}
    command: [{{ if $build }}env, LONGSHORE_BUILD_ID=$(TEMPORAL_WORKER_BUILD_ID), {{ end }}python, -m, service.host, --role, {{ .role }}{{ if and $leases $v.keda.enabled }}, --exit-when-idle, {{ $host.idleSeconds | quote }}{{ end }}]
    {{- end }}
    {{- if or $leases $v.metrics.port }}
    env:
      {{- if $leases }}
      - name: LONGSHORE_HOST_ADDRESS  # where the service reaches it, by mutual TLS
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      {{- if eq .role "gpu" }}
      - {name: LONGSHORE_DRAIN_GRACE_S, value: {{ $host.drainSeconds | quote }}}
      {{- else if $v.network.weights }}
      - name: LONGSHORE_SAMPLING__WEIGHTS_ADDRESS  # where GPU hosts' workers send it weights
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      {{- end }}
      {{- if and $v.keda.enabled $host.min }}
      - {name: LONGSHORE_WARM_HOSTS, value: {{ $host.min | quote }}}
      {{- end }}
      {{- if and $host.shape (ne $host.shape $v.shape) }}
      - {name: LONGSHORE_SHAPE, value: {{ $host.shape | quote }}}
      {{- end }}
      {{- end }}
      {{- with $v.metrics.port }}
      - {name: LONGSHORE_METRICS__PORT, value: {{ . | quote }}}
      - {name: LONGSHORE_METRICS__ADDRESS, value: "0.0.0.0"}
      {{- end }}
    {{- end }}
    envFrom:
      - configMapRef: {name: {{ $root.Release.Name }}-settings}
      - secretRef: {name: {{ $v.secrets.store }}}
      - secretRef: {name: {{ $v.secrets.seal }}}
      {{- with $v.temporal.apiKeySecret }}
      - secretRef: {name: {{ . }}}
      {{- end }}
      {{- if eq .role "service" }}
      - secretRef: {name: {{ $v.secrets.api }}}
      {{- with $v.secrets.database }}
      - secretRef: {name: {{ . }}}
      {{- end }}
      {{- end }}
    {{- if or (eq .role "service") $v.metrics.port }}
    ports:
      {{- if eq .role "service" }}
      - {name: http, containerPort: {{ $v.service.port }}}
      {{- end }}
      {{- with $v.metrics.port }}
      - {name: metrics, containerPort: {{ . }}}
      {{- end }}
    {{- end }}
    {{- if eq .role "service" }}
    # On a busy node it took 22 s to start, and up to 6 s to answer: by default it would be killed after 30 s,
    # and removed from its Service whenever three answers take more than 1 s.
    startupProbe:
      httpGet: {path: /healthz, port: http}
      periodSeconds: 5
      failureThreshold: 60
    livenessProbe:
      httpGet: {path: /healthz, port: http}
      timeoutSeconds: 10
    readinessProbe:
      httpGet: {path: /readyz, port: http}
      periodSeconds: 10
      timeoutSeconds: 10
    {{- else }}
    {{- $told := "polls" }}
    {{- if and $leases $v.keda.enabled }}{{ $told = "leased" }}
    # Ready: it has had a lease for 10 s. Until then KEDA counts its job as on its way to a waiting lease, since
    # Temporal's count of those, up to 5 s old, may still include this one.
    {{- end }}
    readinessProbe:
      exec: {command: [test, -e, /var/lib/longshore/{{ $told }}-{{ .role }}]}
      periodSeconds: 5
      {{- if eq $told "leased" }}
      successThreshold: 3
      {{- end }}
    {{- end }}
    {{- /* Amounts as strings: KEDA writes numbers so, and owns them from then on, at which `helm upgrade` fails. */}}
    resources: {{ regexReplaceAll ":([0-9.]+)([,}])" (toJson $own.resources) ":\"${1}\"${2}" }}
    volumeMounts:
      - {name: state, mountPath: /var/lib/longshore}
      - {name: tmp, mountPath: /tmp}
      - {name: tmp, mountPath: /home/longshore, subPath: home}
      {{- if $own.shm }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- if $v.temporal.tlsSecret }}
      - {name: temporal-tls, mountPath: /etc/longshore/temporal, readOnly: true}
      {{- end }}
volumes:
  - name: state
    emptyDir: {{ if $own.state }}{sizeLimit: {{ $own.state }}}{{ else }}{}{{ end }}
  - name: tmp
    emptyDir: {sizeLimit: 20Gi}
  {{- with $own.shm }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ . }}}
  {{- end }}
  {{- with $v.temporal.tlsSecret }}
  - name: temporal-tls
    secret: {secretName: {{ . }}}
  {{- end }}
{{- end }}

{{- /* Pods read settings once, as they start: this annotation changes with them, so that an upgrade replaces the pods. */}}
{{- define "longshore.settingsRead" -}}
annotations:
  checksum/config: {{ include (print .Template.BasePath "/settings.yaml") . | sha256sum }}
{{- end }}

{{- /* A Deployment of a process. As longshore.pod, and app, replicas. */}}
{{- define "longshore.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .app }}
spec:
  replicas: {{ .replicas }}
  {{- if .host }}
  strategy: {type: Recreate}
  {{- end }}
  selector:
    matchLabels: {app: {{ .label | default .app }}{{ if .host }}, shape: {{ .shape }}{{ end }}}
  template:
    metadata:
      labels: {app: {{ .label | default .app }}{{ if .host }}, shape: {{ .shape }}{{ end }}}
      {{- include "longshore.settingsRead" .root | nindent 6 }}
    spec:
      {{- include "longshore.pod" . | nindent 6 }}
{{- end }}

{{- /* A limit of how many pods of an app may be evicted at a time. */}}
{{- define "longshore.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .app }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {app: {{ .label | default .app }}{{ with .shape }}, shape: {{ . }}{{ end }}}
{{- end }}
