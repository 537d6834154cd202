{{/* Labels that select the controller's pods. They can never change. */}}
{{- define "kubetorch.selector" -}}
app.kubernetes.io/name: kubetorch
app.kubernetes.io/component: controller
{{- end }}

{{/* Labels that select the pods of a data store of its own. They can never change. */}}
{{- define "kubetorch.storeSelector" -}}
app.kubernetes.io/name: kubetorch
app.kubernetes.io/component: store
{{- end }}

{{/* Labels of every object. */}}
{{- define "kubetorch.labels" -}}
app.kubernetes.io/name: kubetorch
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
kubetorch.com/install-namespace: {{ .Release.Namespace | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The references of the two images, from repository, tag and digest. */}}
{{- define "kubetorch.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}
{{- define "kubetorch.podImage" -}}
{{- with .Values.podImage -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* What lies in no namespace has the namespace of the installation in its name. */}}
{{- define "kubetorch.clusterName" -}}
kubetorch-controller.{{ .Release.Namespace }}
{{- end }}

{{- /* Rules for whatever a service may consist of. */}}
{{- define "kubetorch.kindRules" -}}
# What a deploy applies, and what a teardown deletes.
- apiGroups: [""]
  resources: [pods, services]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets, replicasets, daemonsets]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [batch]
  resources: [jobs, cronjobs]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [serving.knative.dev]
  resources: [services]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [kubeflow.org]
  resources: [pytorchjobs, tfjobs, mxjobs, xgboostjobs, jaxjobs, mpijobs]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [trainer.kubeflow.org]
  resources: [trainjobs, trainingruntimes]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, update, patch, delete]
{{- end }}

{{/* What the controller may do in the namespaces of workloads. */}}
{{- define "kubetorch.workloadRules" -}}
# Its own records.
- apiGroups: [kubetorch.com]
  resources: [kubetorchworkloads]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [kubetorch.com]
  resources: [kubetorchworkloads/status, kubetorchworkloads/finalizers]
  verbs: [get, update, patch]
{{ include "kubetorch.kindRules" . }}
- apiGroups: [""]
  resources: [serviceaccounts, secrets, persistentvolumeclaims]
  verbs: [get, list, watch, create, update, patch, delete]
# The rights of a workload's own service account. It can grant these roles and no other.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [clusterroles]
  verbs: [bind]
  resourceNames: [kubetorch-edit, kubetorch-view]
# The Services of autoscaled services without a pod lead to the controller.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch, create, update, patch, delete]
# Why a pod does not start, what it said, and what would let it start.
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods/log, resourcequotas, limitranges]
  verbs: [get, list, watch]
- apiGroups: [serving.knative.dev]
  resources: [revisions, configurations, routes]
  verbs: [get, list, watch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads, localqueues]
  verbs: [get, list, watch]
{{- with .Values.rbac.extraRules }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* URL of a data store of its own, for the controller and for pods. */}}
{{- define "kubetorch.storeUrl" -}}
http://kubetorch-store.{{ .Release.Namespace }}.svc.cluster.local:8080
{{- end }}

{{/* The variables that the processes of the image have in common. */}}
{{- define "kubetorch.processEnv" -}}
- name: KT_INSTALL_NAMESPACE
  value: {{ .Release.Namespace | quote }}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: KT_LISTEN_PORT
  value: "8080"
- name: KT_LOG_LEVEL
  value: {{ .Values.logLevel }}
- name: KT_BLOBS_DIR
  value: /var/lib/kubetorch
{{- end }}

{{/* The variables of the process that has the data store. */}}
{{- define "kubetorch.storeEnv" -}}
{{- if .Values.store.bucket }}
- name: KT_STORE_BUCKET
  value: {{ .Values.store.bucket | quote }}
{{- with .Values.store.endpoint }}
- name: KT_STORE_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .Values.store.region }}
- name: AWS_REGION
  value: {{ . | quote }}
{{- end }}
{{- with .Values.store.secretName }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: AWS_ACCESS_KEY_ID
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: AWS_SECRET_ACCESS_KEY
- name: AWS_SESSION_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: AWS_SESSION_TOKEN
      optional: true
{{- end }}
{{- end }}
{{- with .Values.buckets.allowedNetworks }}
- name: KT_BUCKET_NETWORKS
  value: {{ join "," . | quote }}
{{- end }}
{{- end }}

{{/* The probes of the processes of the image. */}}
{{- define "kubetorch.probes" -}}
startupProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 1
  failureThreshold: 60
livenessProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet:
    path: /health
    port: http
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}
